"""Sources of machines: a rental service, or a list of hosts."""
