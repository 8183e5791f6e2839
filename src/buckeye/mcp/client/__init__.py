"""Sessions with MCP servers, by pipes or HTTP; every answer is bounded, and every wait has a deadline."""
