"""MCP servers as environments: sessions, action mappings, the parser of replies, and the rollout."""
