"""2048 as text: an MCP server for the training of language-model agents."""

__version__ = "0.1.0"
