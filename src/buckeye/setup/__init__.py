"""Configurations from a server, tasks or a model, and better ones from an existing configuration."""
