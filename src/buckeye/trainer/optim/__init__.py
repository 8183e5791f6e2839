"""Gradients and what is done with them."""
