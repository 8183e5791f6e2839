"""Runtimes for the environment of a session: command, project folder, container, or unpacked image."""
