"""What was played: rollouts and their groups. A bad rollout is data: kept, and never given a reward of 0."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from buckeye.envs.base import Message, Outcome, Task
from buckeye.inference.client import Session
from buckeye.orchestrator.advantages import Scored
from buckeye.orchestrator.training_samples import Segment


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """One played rollout. `reward` is None exactly when `outcome.error` is set. Of the turns after the first,
    `extended` continued the tokens before them and `branched` began a new segment. `sampling_seconds` of the
    `seconds` it waited for sampled tokens; it `ended` then on the event loop's clock. `shaping` is what each
    cause adds to the reward before training on it. Its tokens were sampled with `temperature`; `replies` are
    what they say, turn by turn, and `messages` the conversation after the last of these. `prompt_tokens` and
    `reply_tokens` are summed over the turns, as the policy counts them. It was `cut` if its sampling was
    ended early, so that it could still be used. `retried` are the attempts before it, which failed."""

    env_name: str
    task: Task
    outcome: Outcome
    segments: tuple[Segment, ...]
    truncated: bool
    turns: int
    seconds: float
    sampling_seconds: float = 0.0
    ended: float = 0.0
    extended: int = 0
    branched: int = 0
    shaping: Mapping[str, float] = field(default_factory=dict)
    temperature: float = 1.0
    replies: tuple[str, ...] = ()
    messages: tuple[Message, ...] = ()
    prompt_tokens: int = 0
    reply_tokens: int = 0
    cut: bool = False
    retried: tuple[Rollout, ...] = ()

    @property
    def reward(self) -> float | None:
        """What the environment paid."""
        return self.outcome.reward

    @property
    def shaped_reward(self) -> float | None:
        """What is trained on."""
        return None if self.reward is None else self.reward + sum(self.shaping.values())

    def record(self) -> dict[str, Any]:
        """What files say of it, also of an errored one. What a message holds may be more than JSON can."""
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

    def as_scored(self) -> Scored:
        """What its advantage is made of; only for a rollout that has a reward. Shaping, and the reward of an
        environment that gives none by turn, are paid at the last turn."""
        assert self.reward is not None
        added = sum(self.shaping.values())
        lengths: Counter[int] = Counter()
        for segment in self.segments:
            lengths.update(segment.turns)
        return Scored(
            reward=self.reward + added,
            turn_rewards=self._turn_rewards(self.reward, added),
            turn_lengths=[lengths[turn] for turn in range(self.turns)],
            task=self.task,
            replies=self.replies,
            components=self.outcome.components,
            stop_reason=self.outcome.stop_reason,
            truncated=self.truncated,
        )

    def _turn_rewards(self, reward: float, shaping: float) -> list[float]:
        if not self.turns:
            return []
        given = self.outcome.turn_rewards
        paid = [0.0] * (self.turns - 1) + [reward] if given is None else list(given)
        before, last = paid[: self.turns - 1], paid[self.turns - 1 :]  # last: and turns without room
        return [*before, sum(last) + shaping]

    @property
    def completion_tokens(self) -> int:
        """How many tokens the policy sampled; as its server counted them, where they were not recorded."""
        return sum(sum(s.loss_mask) for s in self.segments) if self.segments else self.reply_tokens

    @property
    def total_tokens(self) -> int:
        """Prompt, environment and sampled tokens."""
        return sum(len(s.token_ids) for s in self.segments)

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version that sampled a token, None if nothing was sampled."""
        versions = [v for s in self.segments for v in s.versions if v >= 0]
        return min(versions, default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """All rollouts of one task that may be compared with each other. Errored ones are kept for the count."""

    index: int
    rollouts: tuple[Rollout, ...]

    @property
    def plays(self) -> list[Rollout]:
        """Its rollouts, and the attempts at them that failed before: everything that was played for it."""
        return [play for rollout in self.rollouts for play in (*rollout.retried, rollout)]

    @property
    def failed(self) -> list[Rollout]:
        """Those of its plays that have no reward."""
        return [play for play in self.plays if play.reward is None]

    @property
    def scored(self) -> list[Rollout]:
        """The rollouts that have a reward."""
        return [r for r in self.rollouts if r.reward is not None]

    @property
    def rewards(self) -> list[float]:
        return [r.reward for r in self.rollouts if r.reward is not None]

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version that sampled a token of the group, None if nothing was sampled."""
        versions = [r.oldest_version for r in self.scored if r.oldest_version is not None]
        return min(versions, default=None)

    @property
    def errors(self) -> list[str]:
        """Why its errored rollouts failed, with their task."""
        failed = [r for r in self.rollouts if r.outcome.error is not None]
        return [f"{r.env_name}, task {r.task.id}: {r.outcome.error}" for r in failed]


class Flight:
    """One group in flight, of `size` rollouts. `now` gives the policy version of the engines."""

    def __init__(self, index: int = 0, size: int = 1, *, now: Callable[[], int] = lambda: 0) -> None:
        self.index = index
        self.size = size
        self.is_cut = False
        """Whether nothing more is sampled for it."""
        self.plays = 0
        """Attempts at its rollouts that have ended, those that failed included."""
        self._now = now
        self._began: tuple[int, float] | None = None
        self._sessions: list[Session] = []
        self._aborting: list[asyncio.Task[None]] = []

    @property
    def version(self) -> int:
        """No token of it is older. While none of its rollouts has begun, that is the present version."""
        return self._now() if self._began is None else self._began[0]

    @property
    def seconds(self) -> float:
        """How long it has been played."""
        return 0.0 if self._began is None else asyncio.get_running_loop().time() - self._began[1]

    def begin(self) -> None:
        """One of its rollouts begins."""
        if self._began is None:
            self._began = self._now(), asyncio.get_running_loop().time()

    def samples_with(self, session: Session) -> None:
        """What is asked in this session ends when the group is cut."""
        self._sessions.append(session)

    def cut(self) -> None:
        """Sample no more for it: open replies end with what they have, later ones are empty."""
        if not self.is_cut:
            self.is_cut = True
            self._aborting = [asyncio.create_task(session.abort()) for session in self._sessions]


def leaves_room(
    size: int, due: int, waiting: Mapping[int, int], *, open_places: int, batch: int, batch_size: int
) -> bool:
    """Whether a group of `size` rollouts, which batch `due` is the last to be able to have, can have some of
    the `open_places` of batch `batch`: all that has to be used sooner still finds a place in time. `waiting`
    says how many rollouts, finished or in flight, have which last batch. (The test of earliest deadlines
    first: up to each deadline, what is due fits.)"""
    needed = 0
    for other_due in sorted(other for other in waiting if batch <= other < due):
        needed += waiting[other_due]
        if needed > max(0, open_places - size) + (other_due - batch) * batch_size:
            return False
    return True
