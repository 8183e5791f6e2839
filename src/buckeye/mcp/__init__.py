"""MCP servers as environments: sessions, action mappings, the reply parser and the rollout."""
