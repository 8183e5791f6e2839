"""vLLM as the engine: its OpenAI server, started and monitored as a child process.

`plugin/` holds the modules that run inside vLLM's processes. They do not import Buckeye, because vLLM may
have a separate environment.
"""
