"""Model client for `verifiers` v0. This module is imported only if `verifiers` v0 is installed."""

from __future__ import annotations

from typing import Any

from verifiers.clients import OpenAIChatCompletionsClient
from verifiers.errors import OverlongPromptError


class EmptyReplyClient(OpenAIChatCompletionsClient):
    """Client that accepts empty replies, so that the environment scores them. The base class raises an error.

    If a reply is empty because the context is full, the client raises OverlongPromptError, which ends the
    rollout.
    """

    async def raise_from_native_response(self, response: Any) -> None:
        """Raise the error for a missing reply: OverlongPromptError if the context is full."""
        choices = response.choices if response is not None else None
        if not choices or len(choices) != 1:
            await super().raise_from_native_response(response)
            return
        message = choices[0].message
        if choices[0].finish_reason == "length" and not message.content and not message.tool_calls:
            reasoning = (message.model_extra or {}).get("reasoning_content")
            if not reasoning:
                raise OverlongPromptError("no room for a reply: the context is full")

    async def from_native_response(self, response: Any) -> Any:
        """Return the reply. Missing content becomes an empty text, as environments expect."""
        reply = await super().from_native_response(response)
        if reply.message.content is None and not reply.message.tool_calls:
            reply.message.content = ""
        return reply
