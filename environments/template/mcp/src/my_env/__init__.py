"""An MCP environment: find a number by guessing."""
