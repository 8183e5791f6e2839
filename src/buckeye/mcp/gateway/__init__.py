"""HTTP gateway for MCP that starts a separate environment (a server process) for every session."""
