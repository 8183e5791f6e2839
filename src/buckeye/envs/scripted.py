"""Policies that need no model: what they say was written beforehand."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from buckeye.envs.base import FinishReason, Message, Reply, Tool
from buckeye.errors import InferenceError

TURN_LIMIT = 1000


@dataclass(slots=True)
class ScriptedPolicy:
    """Says `text` in every turn, and at most `TURN_LIMIT` times."""

    text: str
    finish_reason: FinishReason = "stop"
    turns: int = field(default=0, init=False)

    async def chat(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> Reply:
        """The same reply again. Raises InferenceError after `TURN_LIMIT` of them."""
        del messages, tools
        if self.turns:
            await asyncio.sleep(0)  # so that the deadline can end a rollout that never stops asking
        self.turns += 1
        if self.turns > TURN_LIMIT:
            raise InferenceError(f"the rollout asked for more than {TURN_LIMIT} replies")
        message = {"role": "assistant", "content": self.text}
        return Reply(text=self.text, finish_reason=self.finish_reason, message=message)


class FailingPolicy:
    """Stands for an engine that does not answer."""

    async def chat(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> Reply:
        """Always raises InferenceError."""
        del messages, tools
        await asyncio.sleep(0)
        raise InferenceError("no engine answers (a test of how the environment takes it)")
