"""Where machines come from: a rental service, or a list of hosts."""
