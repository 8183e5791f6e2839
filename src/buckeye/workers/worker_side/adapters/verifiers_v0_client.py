"""The client of `verifiers` v0 by which an environment asks the model. Imported only where v0 is."""

from __future__ import annotations

from typing import Any

from verifiers.clients import OpenAIChatCompletionsClient
from verifiers.errors import OverlongPromptError


class EndpointClient(OpenAIChatCompletionsClient):
    """An empty reply is what the model said, to be graded like any other; verifiers would call it an error.
    One that is empty because there was no room for it ends the rollout, as verifiers ends it then."""

    async def raise_from_native_response(self, response: Any) -> None:
        """Raises verifiers' errors for an answer without a reply, and OverlongPromptError for no room."""
        choices = response.choices if response is not None else None
        if not choices or len(choices) != 1:
            await super().raise_from_native_response(response)
            return
        message = choices[0].message
        if choices[0].finish_reason == "length" and not message.content and not message.tool_calls:
            reasoning = (message.model_extra or {}).get("reasoning_content")
            if not reasoning:
                raise OverlongPromptError("there was no room for a reply")

    async def from_native_response(self, response: Any) -> Any:
        """The reply; what is empty is a text without characters, which is what environments read."""
        reply = await super().from_native_response(response)
        if reply.message.content is None and not reply.message.tool_calls:
            reply.message.content = ""
        return reply
