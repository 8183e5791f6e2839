"""Fast start of Python servers: import the libraries in one process, and fork it for every session."""
