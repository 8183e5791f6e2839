"""vLLM as the engine: Buckeye starts and monitors vLLM's OpenAI server as a child process.

The modules in `plugin/` run inside vLLM's processes. They do not import Buckeye, which may not be installed
in vLLM's environment.
"""
