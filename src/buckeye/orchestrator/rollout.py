"""Rollouts and groups. A failed rollout is kept with its error. It never gets a reward of 0."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from buckeye.base.storage import change_texts, utf8
from buckeye.envs.base import Message, Outcome, Task
from buckeye.monitor.rollouts import SampledCall
from buckeye.orchestrator.advantages import Scored, shaped_turn_rewards
from buckeye.orchestrator.training_samples import Segment

INVALID_BOUNDARIES = ("task", "config")
"""Boundaries of errors that a retry cannot fix."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """Finished rollout. It has either a `reward` or an `outcome.error`, never both.

    `turns_extended` is the number of turns that continued the tokens of earlier turns. `turns_branched` is
    the number of turns that began a new segment. Neither number includes the first turn. `sampling_seconds`
    is the part of `seconds` spent waiting for sampled tokens, in `calls`. `end_time` is on the event loop's
    clock.
    `shaping` has the amount that each cause adds to the reward for training. The tokens were sampled with
    `temperature`. `replies` has the text of each turn, and `messages` the conversation after the last turn.
    `prompt_tokens` and `reply_tokens` are sums over the turns, as the policy counts them. `cut` is True if
    sampling was ended early, because the rollout was too old for every later batch. `earlier_attempts` has
    the failed attempts before this one.
    """

    env_name: str
    task: Task
    outcome: Outcome
    segments: tuple[Segment, ...]
    truncated: bool
    turns: int
    seconds: float
    sampling_seconds: float = 0.0
    calls: tuple[SampledCall, ...] = ()
    end_time: float = 0.0
    turns_extended: int = 0
    turns_branched: int = 0
    shaping: Mapping[str, float] = field(default_factory=dict)
    temperature: float = 1.0
    replies: tuple[str, ...] = ()
    messages: tuple[Message, ...] = ()
    prompt_tokens: int = 0
    reply_tokens: int = 0
    cut: bool = False
    earlier_attempts: tuple[Rollout, ...] = ()

    @property
    def reward(self) -> float | None:
        """Raw reward from the environment."""
        return self.outcome.reward

    @property
    def shaped_reward(self) -> float | None:
        """Reward for training: the raw reward plus shaping."""
        return None if self.reward is None else self.reward + sum(self.shaping.values())

    def record(self) -> dict[str, Any]:
        """Return the rollout as a record for files. `messages` may have values that JSON cannot represent."""
        return {
            "reward": self.reward,
            "components": dict(self.outcome.components),
            "explanations": dict(self.outcome.explanations),
            "stop_reason": self.outcome.stop_reason,
            "error": self.outcome.error,
            "trace": list(self.outcome.trace),
            "truncated": self.truncated,
            "turns": self.turns,
            "completion_tokens": self.completion_tokens,
            "oldest_version": self.oldest_version,
            "messages": list(self.messages),
        }

    def evaluation_line(self, number: int) -> bytes:
        """Return the JSON line of an evaluation. `number` is the index among the rollouts of the task.

        Task data and message content that JSON cannot represent become text.
        """
        record = {
            "task_id": self.task.id,
            "rollout": number,
            "data": change_texts(dict(self.task.data), _json_key),
            **self.record(),
            "prompt_tokens": self.prompt_tokens,
            "seconds": round(self.seconds, 3),
        }
        return utf8(json.dumps(record, ensure_ascii=False, default=str) + "\n")

    def as_scored(self) -> Scored:
        """Return the input of reward shaping and advantages. The rollout must have a reward."""
        assert self.reward is not None
        added = sum(self.shaping.values())
        lengths: Counter[int] = Counter()
        for segment in self.segments:
            for span in segment.sampled:
                lengths[span.turn] += span.length
        return Scored(
            reward=self.reward + added,
            turn_rewards=shaped_turn_rewards(self.outcome.turn_rewards, self.turns, self.reward, added),
            turn_lengths=[lengths[turn] for turn in range(self.turns)],
            task=self.task,
            replies=self.replies,
            components=self.outcome.components,
            stop_reason=self.outcome.stop_reason,
            truncated=self.truncated,
        )

    @property
    def completion_tokens(self) -> int:
        """Number of sampled tokens; the server's count if the tokens were not recorded."""
        return sum(s.sampled_tokens for s in self.segments) if self.segments else self.reply_tokens

    @property
    def total_tokens(self) -> int:
        """Number of prompt, environment and sampled tokens."""
        return sum(len(s.token_ids) for s in self.segments)

    @property
    def oldest_version(self) -> int | None:
        """Oldest policy version that sampled a token; None if no token was sampled."""
        return min((span.version for s in self.segments for span in s.sampled), default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Rollouts of one task. Advantages compare their rewards. Errored rollouts are included."""

    index: int
    rollouts: tuple[Rollout, ...]

    @property
    def attempts(self) -> list[Rollout]:
        """All attempts: the rollouts and the failed attempts before them."""
        return [attempt for rollout in self.rollouts for attempt in (*rollout.earlier_attempts, rollout)]

    @property
    def failed_attempts(self) -> list[Rollout]:
        """Attempts without a reward."""
        return [attempt for attempt in self.attempts if attempt.reward is None]

    @property
    def scored(self) -> list[Rollout]:
        """Rollouts with a reward."""
        return [r for r in self.rollouts if r.reward is not None]

    @property
    def rewards(self) -> list[float]:
        return [r.reward for r in self.rollouts if r.reward is not None]

    @property
    def trained_tokens(self) -> int:
        """Number of sampled tokens of the scored rollouts."""
        return sum(rollout.completion_tokens for rollout in self.scored)

    @property
    def oldest_version(self) -> int | None:
        """Oldest policy version that sampled a token of a scored rollout; None if no token was sampled."""
        versions = [r.oldest_version for r in self.scored if r.oldest_version is not None]
        return min(versions, default=None)

    @property
    def errors(self) -> list[str]:
        """Errors of the errored rollouts, each with environment and task."""
        failed = [r for r in self.rollouts if r.outcome.error is not None]
        return [f"{r.env_name}, task {r.task.id}: {r.outcome.error}" for r in failed]


def _json_key(key: Any) -> Any:
    return key if isinstance(key, str | int | float | None) else str(key)


class AbortableSession(Protocol):
    """Source of samples that can end its open requests."""

    async def abort(self) -> None: ...


class InFlightGroup:
    """Group of `size` rollouts that has not ended.

    `current_version` returns the policy version of the engines. `on_begin` gets the version when the first
    rollout starts.
    """

    def __init__(
        self,
        index: int = 0,
        size: int = 1,
        *,
        current_version: Callable[[], int] = lambda: 0,
        losses: int = 0,
        on_begin: Callable[[int], None] = lambda version: None,
    ) -> None:
        self.index = index
        self.size = size
        self.losses = losses
        """Number of processes that have ended while they ran the group."""
        self.is_cut = False
        """True if `cut` was called."""
        self.attempts = 0
        """Number of finished attempts of its rollouts, including failed attempts."""
        self.first_version: int | None = None
        """Policy version when the first rollout started; None before."""
        self._current_version = current_version
        self._on_begin = on_begin
        self._sessions: list[AbortableSession] = []
        self._aborting: list[asyncio.Task[None]] = []

    @property
    def version(self) -> int:
        """Lower bound of the policy versions of its tokens.

        It is the version when the first rollout started; before that, the current version.
        """
        return self._current_version() if self.first_version is None else self.first_version

    def begin(self, version: int | None = None) -> None:
        """Record the start of a rollout; the first one fixes `version`, by default to the current one."""
        if self.first_version is None:
            self.first_version = self._current_version() if version is None else version
            self._on_begin(self.first_version)

    def add_session(self, session: AbortableSession) -> None:
        """Register an inference session whose requests are aborted when the group is cut."""
        self._sessions.append(session)

    def cut(self) -> None:
        """End sampling for the group: open replies end early, and later replies are empty."""
        if not self.is_cut:
            self.is_cut = True
            self._aborting = [asyncio.create_task(session.abort()) for session in self._sessions]


def leaves_room(
    size: int, due: int, waiting: Mapping[int, int], *, open_places: int, batch: int, batch_size: int
) -> bool:
    """Return True if a group of `size` rollouts may enter batch `batch`.

    `due` is the last batch that the group may enter. `open_places` is the number of rollouts that `batch`
    still needs. `waiting` counts the other rollouts, finished or in flight. Each key is a batch. The value is
    the number of rollouts that may enter this batch, but no later batch. If batches have a number of tokens,
    all numbers are tokens.

    The group may enter if every other rollout with an earlier `due` then still fits into a batch up to its
    own `due`. This is the schedulability test of earliest deadline first: for each deadline, all work that is
    due by then fits.
    """
    needed = 0
    for other_due in sorted(other for other in waiting if batch <= other < due):
        needed += waiting[other_due]
        if needed > max(0, open_places - size) + (other_due - batch) * batch_size:
            return False
    return True
