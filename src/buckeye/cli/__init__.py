"""Command-line interface: each module parses arguments, calls another room, and prints the result."""
