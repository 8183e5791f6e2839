"""How the environment of one session is run: a command, a project folder, a container, an unpacked image."""
