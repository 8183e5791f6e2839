"""Policies without a model, for tests of environments."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from buckeye.envs.base import FinishReason, Message, Reply, Tool
from buckeye.errors import InferenceError

TURN_LIMIT = 1000


@dataclass(slots=True)
class ScriptedPolicy:
    """Policy that replies `text` in every turn, up to `TURN_LIMIT` times."""

    text: str
    finish_reason: FinishReason = "stop"
    turns: int = field(default=0, init=False)

    async def chat(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> Reply:
        """Return the fixed reply. Raise `InferenceError` after `TURN_LIMIT` calls."""
        del messages, tools
        if self.turns:
            await asyncio.sleep(0)  # so that a timeout can cancel an endless rollout
        self.turns += 1
        if self.turns > TURN_LIMIT:
            raise InferenceError(
                f"the rollout requested more than {TURN_LIMIT} replies", code="BK-ENV-FAILED"
            )
        message = {"role": "assistant", "content": self.text}
        return Reply(text=self.text, finish_reason=self.finish_reason, message=message)


class RecordedPolicy:
    """Policy that replies with the given assistant messages, in order."""

    def __init__(self, replies: Iterable[Message]) -> None:
        self._replies = iter(replies)

    async def chat(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> Reply:
        """Return the next message. Raise `InferenceError` after the last one."""
        del messages, tools
        message = next(self._replies, None)
        if message is None:
            raise InferenceError("the rollout requested more replies than recorded", code="BK-ENV-FAILED")
        return Reply(text=str(message.get("content") or ""), finish_reason="stop", message=message)


class FailingPolicy:
    """Policy that simulates an unreachable inference engine."""

    async def chat(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> Reply:
        """Raise `InferenceError`."""
        del messages, tools
        await asyncio.sleep(0)
        raise InferenceError(
            "no engine replies (simulated, to test the environment)", code="BK-INFERENCE-UNREACHABLE"
        )
