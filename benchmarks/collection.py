"""Compare rules of collecting batches: which rollouts reach the loss, and how fast, on virtual time.

    python benchmarks/collection.py [--laws ...] [--levels 0 1 2 4] [--oversampling 1 1.5] [--batches 60]

Batches of 16 groups of 8 rollouts. A distribution gives the duration of a rollout, and its tokens are
proportional; a training step takes the mean duration of a batch. The engines have slots for as many rollouts
as may be in flight (plenty), or for half of them (scarce), and load new weights immediately. Time is virtual:
the clock jumps to the next event, so nothing depends on the machine. Rules:

    buckeye    the real class of orchestrator/collector.py
    overtake   first to finish, dropped when older than the run-ahead: Buckeye's former rule
    prime-rl   first to finish; rollouts that span more than 8 updates are cancelled
    areal      the oldest that are finished first; never dropped

Shows for each: the share of groups dropped, the share of sampling time that was lost, the length of trained
rollouts relative to all started ones, with its 95 % interval, and the time relative to `areal`, which neither
waits for a group nor drops one.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import math
import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from buckeye.config.environments import EnvPauseConfig
from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.envs.base import Outcome, Task
from buckeye.orchestrator.collected_groups import CollectedGroups
from buckeye.orchestrator.collector import GroupCollector
from buckeye.orchestrator.pauses import EnvironmentPauses
from buckeye.orchestrator.rollout import Group, InFlightGroup, Rollout
from buckeye.orchestrator.simulation import VirtualTime
from buckeye.orchestrator.task_sampler import GroupTask
from buckeye.orchestrator.training_samples import Segment, Span

GROUPS, SIZE = 16, 8
AGE = 8

LAWS: dict[str, Callable[[random.Random], float]] = {
    "log-normal": lambda rng: rng.lognormvariate(0.0, 0.7),
    "two kinds": lambda rng: rng.choice((0.5, 3.0)) * rng.uniform(0.8, 1.2),
    "heavy tail": lambda rng: min(30.0, 0.5 * rng.paretovariate(1.5)),
    "uniform": lambda rng: rng.uniform(0.2, 1.8),
}
"""Seconds of a rollout. Those of `two kinds` depend on the task: some take six times as long as others."""


@dataclass(slots=True)
class Engine:
    """Simulated engine whose groups have fixed durations from their start.

    `begun` holds the seconds of every rollout, by group; a group that is cut ends immediately.
    """

    law: str
    places: int
    seed: int
    begun: list[float] = field(default_factory=list)
    attempts: int = 0
    _free: list[float] = field(default_factory=list)

    def start_group(self, task: GroupTask, size: int, flight: InFlightGroup) -> asyncio.Task[Group]:
        return asyncio.create_task(self._play(task, size, flight))

    async def _play(self, task: GroupTask, size: int, flight: InFlightGroup) -> Group:
        rng = random.Random(f"{self.law}/{self.seed}/{task.index}")
        kind = rng.getstate()
        seconds = []
        for _ in range(size):
            if self.law == "two kinds":
                rng.setstate(kind)  # all rollouts of a task have the same duration
            seconds.append(LAWS[self.law](rng))
        clock = asyncio.get_running_loop().time
        begins, ends = [], []
        for one in seconds:
            free = heapq.heappop(self._free) if len(self._free) >= self.places else 0.0
            begins.append(max(clock(), free))
            ends.append(begins[-1] + one)
            heapq.heappush(self._free, ends[-1])
        await asyncio.sleep(min(begins) - clock())
        flight.begin()
        self.begun.append(statistics.fmean(seconds))
        while clock() < max(ends) and not flight.is_cut:
            await asyncio.sleep(min(0.25, max(ends) - clock()))
        flight.attempts += size
        self.attempts += size
        spent = [max(0.0, min(one, clock() - begun)) for one, begun in zip(seconds, begins, strict=True)]
        return Group(index=task.index, rollouts=tuple(_rollout(flight, one) for one in spent))


def _rollout(flight: InFlightGroup, seconds: float) -> Rollout:
    one = np.zeros(1, np.float32)
    segment = Segment(one.astype(np.int32), one, [Span(1, turn=0, version=flight.version)])
    return Rollout(
        env_name="simulated",
        task=Task(id="t", messages=()),
        outcome=Outcome(reward=0.5),
        segments=(segment,),
        truncated=flight.is_cut,
        cut=flight.is_cut,
        turns=1,
        seconds=seconds,
        sampling_seconds=seconds,
    )


class _Tasks:
    """Unlimited tasks, each used once."""

    environment = argparse.Namespace(name="simulated", rollout_settings=argparse.Namespace(group_size=None))

    def __getitem__(self, index: int) -> GroupTask:
        return GroupTask(index=index, env=self.environment, task=Task(id=str(index), messages=()))  # type: ignore[arg-type]

    def environment_of(self, index: int) -> Any:
        return self.environment

    def has_tasks_outside(self, held: Any) -> bool:
        return True


class Overtake(GroupCollector):
    """Buckeye's former rule: first to finish, dropped when older than the run-ahead."""

    def _order(self, ended: Any) -> tuple[int, int]:
        return 0, self._finished.index(ended)

    def _leaves_room(self, *args: Any) -> bool:
        return True

    def _reason_to_drop(self, ended: Any, step: int) -> str | None:
        return "stale" if step - ended.oldest > self._config.run_ahead else None

    def _cut_lost(self, step: int) -> None: ...


class PrimeRL(Overtake):
    """First to finish; a group that spans more than AGE updates is cancelled and replaced by another task."""

    def set_version(self, version: int) -> None:
        super().set_version(version)
        for flight in self._in_flight.values():
            if version - flight.version > AGE:
                flight.cut()

    def _reason_to_drop(self, ended: Any, step: int) -> str | None:
        return "stale" if ended.group.rollouts[0].cut else None


RULES: dict[str, type[GroupCollector]] = {
    "buckeye": GroupCollector,
    "overtake": Overtake,
    "prime-rl": PrimeRL,
    "areal": GroupCollector,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Result of one run; `trained` and `begun` are mean seconds of rollouts for each group."""

    seconds: float
    batches: list[CollectedGroups]
    begun: list[float]
    unaccounted: int

    @property
    def trained(self) -> list[float]:
        return [_mean(group) for batch in self.batches for group in batch.groups]

    @property
    def dropped(self) -> float:
        """Share of the ended groups that were dropped."""
        dropped = sum(batch.dropped.total() for batch in self.batches)
        return dropped / (dropped + len(self.trained))

    @property
    def lost(self) -> float:
        """Share of the sampling time of ended groups that was lost."""
        lost = sum(_mean(group) for batch in self.batches for _, group in batch.dropped_groups)
        return lost / (lost + sum(self.trained))

    @property
    def bias(self) -> tuple[float, float]:
        """Relative difference of the mean length of trained and started groups, and its 95 % half width.

        The half width treats the trained groups as an independent sample.
        """
        mean = statistics.fmean(self.begun)
        error = statistics.stdev(self.begun) / math.sqrt(len(self.trained))
        return statistics.fmean(self.trained) / mean - 1.0, 1.96 * error / mean


def _mean(group: Group) -> float:
    return statistics.fmean(rollout.seconds for rollout in group.rollouts)


def simulate(
    rule: str,
    law: str,
    *,
    level: int,
    oversampling: float = 1.0,
    scarce: bool = False,
    batches: int = 60,
    seed: int = 0,
    age: int = AGE,
) -> Result:
    """Collect `batches` batches while a trainer takes a mean batch's time for each."""
    places = math.ceil(GROUPS * SIZE * (level + 1) * oversampling)
    engine = Engine(law, places // 2 if scarce else places, seed)
    config = OrchestratorConfig(
        batch_size=GROUPS * SIZE,
        rollouts_per_example=SIZE,
        max_async_level=level,
        max_off_policy_steps=10**6 if rule == "areal" else age,
        oversampling_factor=oversampling,
        max_empty_batches=10,
        weights_timeout=3600,
    )
    tasks: Any = _Tasks()
    pauses = EnvironmentPauses(["simulated"], EnvPauseConfig(), Path("run"))
    player: Any = engine
    collector = RULES[rule](tasks, player, config, pauses, state={})
    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        return runner.run(_collect(collector, engine, batches))


async def _collect(collector: GroupCollector, engine: Engine, batches: int) -> Result:
    collected: list[CollectedGroups] = []
    to_train: asyncio.Queue[None] = asyncio.Queue()

    async def train() -> None:
        for version in range(1, batches + 1):
            await to_train.get()
            await asyncio.sleep(1.0)
            collector.set_version(version)

    trainer = asyncio.create_task(train())
    for step in range(batches):
        collected.append(await collector.collect(step))
        to_train.put_nowait(None)
    await trainer
    now = asyncio.get_running_loop().time()
    unaccounted = collector.unaccounted
    await collector.close()
    return Result(seconds=now, batches=collected, begun=engine.begun, unaccounted=unaccounted)


def main() -> int:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--laws", nargs="+", choices=LAWS, default=list(LAWS))
    parser.add_argument("--levels", nargs="+", type=int, default=[0, 1, 2, 4])
    parser.add_argument("--oversampling", nargs="+", type=float, default=[1.0, 1.5])
    parser.add_argument("--batches", type=int, default=60)
    args = parser.parse_args()
    print("| law | level | over-sampling | places | rule | dropped | lost | length | ± | time |")
    print("|---|---:|---:|---|---|---:|---:|---:|---:|---:|")
    for law in args.laws:
        for level in args.levels:
            for oversampling in args.oversampling:
                for scarce in (False, True):
                    results = {
                        rule: simulate(
                            rule,
                            law,
                            level=level,
                            oversampling=oversampling,
                            scarce=scarce,
                            batches=args.batches,
                        )
                        for rule in RULES
                    }
                    for rule, result in results.items():
                        bias, noise = result.bias
                        cells = [
                            law,
                            str(level),
                            f"{oversampling:g}",
                            "scarce" if scarce else "plenty",
                            rule,
                            f"{result.dropped:.1%}",
                            f"{result.lost:.1%}",
                            f"{bias:+.1%}",
                            f"{noise:.1%}",
                            f"{result.seconds / results['areal'].seconds:.2f}",
                        ]
                        print(f"| {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
