"""Tasks in files: reading, checks, and the variables in them."""
