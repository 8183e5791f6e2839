"""Runtimes that start a session's environment from a command, a project folder or a container image."""
