"""HTTP server of the engine: routes, access control, and replies in OpenAI's format."""
