"""Run the rollouts of `buckeye env play`, print them, and save their chats."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from buckeye.base.columns import counted
from buckeye.base.json_lines import LineFile
from buckeye.base.storage import utf8
from buckeye.envs.base import Outcome, Policy, Task
from buckeye.errors import RunError
from buckeye.evaluation.chat_policy import ChatPolicy, ChatSampling
from buckeye.evaluation.env_play.human_policy import HumanPolicy
from buckeye.evaluation.env_play.printing_policy import PlayRecord, PrintingPolicy, run_and_record
from buckeye.evaluation.env_play.random_policy import RandomPolicy
from buckeye.evaluation.run_eval import model_server
from buckeye.orchestrator.environments import NamedEnvironment

RANDOM_POLICY = "random"
_MOST_FAILURES = 5


class ChatFile:
    """File of chats in the format of `sft`.

    Rollouts without a reward, or with a reward below `minimum`, are left out.
    """

    def __init__(self, path: Path, minimum: float | None) -> None:
        self._file, self._path, self._minimum = LineFile(path), path, minimum
        self._rewards: list[float] = []
        self.kept = 0

    def add(self, record: PlayRecord) -> None:
        """Append the chat of a rollout, if it qualifies."""
        reward = record.outcome.reward
        if reward is None or not record.turns:
            return
        self._rewards.append(reward)
        if self._minimum is not None and reward < self._minimum:
            return
        self._file.append(utf8(json.dumps(record.chat(), ensure_ascii=False, default=str) + "\n"))
        self.kept += 1

    def require_chats(self) -> None:
        """Raise RunError if the file has no chat, also not from an earlier command."""
        if self.kept or (self._path.exists() and self._path.stat().st_size):
            return
        if not self._rewards:
            raise RunError(
                f"{self._path} has no chat: in no rollout did the environment request a reply",
                code="BK-ENV-FAILED",
                hint="Check the environment with `buckeye env check`",
            )
        raise RunError(
            f"{self._path} has no chat: the highest reward of {counted(len(self._rewards), 'rollout')} is "
            f"{max(self._rewards):g}, and --min-reward is {self._minimum:g}",
            code="BK-CLI-ARGUMENT",
            hint="Lower --min-reward, or raise -n. Without --min-reward all rollouts are saved, and a model "
            "learns the format of calls from them",
        )


class _Failures:
    """Consecutive rollouts with one error. After `_MOST_FAILURES` of them, no rollout starts."""

    def __init__(self, total: int) -> None:
        self._total, self._count, self._ended = total, 0, 0
        self._error: str | None = None
        self.stopped: Outcome | None = None

    def add(self, outcome: Outcome) -> bool:
        """Count a rollout. Return True unless its error was printed before."""
        self._ended += 1
        repeats = outcome.reward is None and outcome.error == self._error
        self._count = self._count + 1 if repeats else int(outcome.reward is None)
        self._error = outcome.error if outcome.reward is None else None
        if self._count >= _MOST_FAILURES:
            self.stopped = outcome
        return not repeats

    @property
    def text(self) -> str:
        """Text about a repeated error; empty without one."""
        if self._count < 2:
            return ""
        left = f"; {self._total - self._ended} of {self._total} not started" if self.stopped else ""
        return f"the last error occurred in {self._count} rollouts in a row{left}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaySession:
    """Session that runs rollouts, `at_once` at a time.

    `policy` is None for a person, `RANDOM_POLICY`, or the name of a model. With JSON output, texts for the
    person go to stderr.
    """

    policy: str | None
    base_url: str | None
    api_key_var: str
    sampling: ChatSampling
    seed: int
    at_once: int
    timeout: float
    as_json: bool
    chats: ChatFile | None
    stdout: TextIO = field(default_factory=lambda: sys.stdout)
    """The stdout before the environment runs."""

    async def play(
        self, env: NamedEnvironment, tasks: Sequence[Task], numbers: Sequence[int]
    ) -> list[Outcome]:
        """Run a rollout for each number, on the task of this index modulo the number of tasks."""
        slots = asyncio.Semaphore(1 if self.policy is None else self.at_once)
        failures = _Failures(len(numbers))
        shown = len(numbers) == 1 or self.policy is None

        async with self._policy_factory() as make_policy:

            async def run_one(number: int) -> Outcome:
                task = tasks[number % len(tasks)]
                say: Callable[[str], None] = self._say if shown else lambda text: None
                async with slots:
                    if failures.stopped is not None:
                        return failures.stopped
                    say(f"{env.name}, task {number % len(tasks) + 1} of {len(tasks)}: {task.id}")
                    policy = PrintingPolicy(make_policy(number), say)
                    name = self.policy or "person"
                    record = await run_and_record(env, task, policy, name, timeout=self.timeout)
                if failures.add(record.outcome) or self.as_json:
                    self._print_record(record, shown=shown)
                if self.chats is not None:
                    self.chats.add(record)
                return record.outcome

            outcomes = await asyncio.gather(*map(run_one, numbers))
        if failures.text and not self.as_json:
            print(failures.text, file=sys.stderr)
        return outcomes

    @asynccontextmanager
    async def _policy_factory(self) -> AsyncIterator[Callable[[int], Policy]]:
        """Yield a function that returns the policy for the rollout with a given number."""
        if self.policy is None:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # asyncio's handler cannot stop input()
            yield lambda number: HumanPolicy(self._say)
        elif self.policy == RANDOM_POLICY:
            yield lambda number: RandomPolicy(self.seed + number)
        else:
            async with model_server(
                self.policy,
                self.base_url,
                self.api_key_var,
                timeout=self.timeout,
                max_concurrent=self.at_once,
            ) as server:
                yield lambda number: ChatPolicy(server, self.sampling.with_seed(self.seed + number))

    def _say(self, text: str) -> None:
        if not self.as_json or self.policy is None:
            print(text, file=sys.stderr if self.as_json else sys.stdout, flush=True)

    def _print_record(self, record: PlayRecord, *, shown: bool) -> None:
        if self.as_json:
            print(json.dumps(record.to_json(), ensure_ascii=False, default=str), file=self.stdout, flush=True)
        elif shown:
            print("\n".join(["", *record.lines()]), flush=True)
        else:
            print(f"{record.task.id}: {next(iter(record.lines()))}", flush=True)
