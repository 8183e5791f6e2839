"""Sessions with MCP servers over pipes or HTTP. Each response has a size limit, and each wait a timeout."""
