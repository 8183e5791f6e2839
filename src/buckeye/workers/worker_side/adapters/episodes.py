"""Rollouts of environments with `reset` and `step`, whose actions are the texts of replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..outcomes import to_finite_float
from .base import Boundary, Json, failed, raised, scored
from .model import ModelError, chat


@dataclass(frozen=True, kw_only=True)
class Step:
    """Result of one action: its reward (None: the environment gave none), and the new messages.

    `stop_reason` is not empty at the end of the episode: "done", or a limit. `recorded` is the assistant
    message that the conversation keeps (None: the unchanged reply).
    """

    reward: Any
    messages: Sequence[Json] = ()
    stop_reason: str = ""
    recorded: Json | None = None


class Episode(Protocol):
    """One episode. It belongs to one rollout."""

    async def start(self) -> Sequence[Json]:
        """Start the episode, and return the first messages."""
        ...

    async def step(self, reply: str) -> Step:
        """Execute the action in a reply."""
        ...

    def components(self) -> Mapping[str, float]:
        """Return numbers for the log."""
        ...

    async def close(self) -> None:
        """Release everything that the episode holds, also after an error."""
        ...


async def run_episode(episode: Episode, endpoint: Json) -> Json:
    """Run one episode with the model of an endpoint, and return the outcome.

    The reward is the sum of the rewards of all steps. An episode that reaches a limit keeps the sum up to
    this point. An episode that is done without any reward is an error.
    """
    boundary: Boundary = "reset"
    rewards: list[float | None] = []
    stop_reason = ""
    try:
        try:
            conversation = list(await episode.start())
            boundary = "step"
            while not stop_reason:
                reply = await chat(endpoint, conversation)
                if reply.no_room:
                    stop_reason = "truncated"
                    break
                step = await episode.step(reply.text)
                rewards.append(None if step.reward is None else to_finite_float(step.reward, "the reward"))
                conversation += [step.recorded or reply.message, *step.messages]
                stop_reason = step.stop_reason
        finally:
            await episode.close()
    except ModelError as error:
        return raised("model", error)
    except Exception as error:
        return raised(boundary, error)
    if not rewards:
        return failed("model", "NoRoom", "the context has no room for the first reply")
    if stop_reason == "done" and all(reward is None for reward in rewards):
        return failed("score", "NoReward", "the episode ended without a reward")
    turn_rewards = [reward or 0.0 for reward in rewards]
    components = {**episode.components(), "turns": len(turn_rewards)}
    return {
        **scored(sum(turn_rewards), components=components, stop_reason=stop_reason),
        "turn_rewards": turn_rewards,
    }
