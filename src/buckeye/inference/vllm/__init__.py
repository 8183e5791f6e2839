"""vLLM as the engine: its own OpenAI server, started and watched as a child process.

`plugin/` holds the two modules that run inside vLLM's processes. They import nothing of Buckeye, because vLLM
may live in an environment of its own.
"""
