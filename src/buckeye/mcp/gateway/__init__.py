"""HTTP gateway for MCP that gives every session a separate environment."""
