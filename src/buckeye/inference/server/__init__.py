"""The engine behind HTTP: routes, the gate, and replies in the form of OpenAI's API."""
