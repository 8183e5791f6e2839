"""Environment whose model calls the tools of MCP servers: configuration, rollouts and grading."""
