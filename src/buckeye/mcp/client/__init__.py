"""Sessions with MCP servers over pipes or HTTP. Every answer has a size limit and every wait a deadline."""
