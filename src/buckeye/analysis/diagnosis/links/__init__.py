"""Checks of each link of the chain of learning."""
