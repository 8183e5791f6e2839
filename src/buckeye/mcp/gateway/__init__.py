"""An HTTP server of MCP that gives every session an environment of its own."""
