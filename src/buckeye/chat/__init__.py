"""Types of third-party HTTP APIs: requests, messages and errors. Does no input or output."""
