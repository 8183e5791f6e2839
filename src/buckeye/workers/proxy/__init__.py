"""A policy behind the HTTP APIs of agents: OpenAI's, Anthropic's, and vLLM's for token ids.

async with serve(policy, limits=Limits(max_turns=8)) as endpoint:
    ...  # any client with endpoint.base_url and endpoint.api_key reaches the policy
endpoint.usage.stop_reason, endpoint.usage.failure
"""

from buckeye.workers.proxy.endpoint import Endpoint, Limits, StopReason, Usage
from buckeye.workers.proxy.server import serve

__all__ = ["Endpoint", "Limits", "StopReason", "Usage", "serve"]
