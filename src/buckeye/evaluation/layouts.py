"""Forecast of a run with other layouts: laws are fitted to its rollouts and metrics, and then simulated."""

from __future__ import annotations

import random
import statistics
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np

from buckeye.base.storage import read_json
from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.errors import UsageError
from buckeye.monitor.metrics import RunMetrics, read_metrics
from buckeye.monitor.rollouts import RecordedRollout, read_rollouts, rollout_steps
from buckeye.orchestrator.simulation import EngineLaw, Laws, RolloutLaw, Simulated, simulate

_MIN_ROLLOUTS = 32
_POINTS = 8


def fit_engine(
    rollouts: Sequence[RecordedRollout], *, engines: int, max_num_seqs: int, update: float = 0.0
) -> EngineLaw:
    """Return the law of one engine: seconds per token against the number of sequences, by least squares.

    The number of sequences of a rollout is the mean number of rollouts that sampled during it.
    """
    used = [r for r in rollouts if r.completion_tokens and r.sampling_seconds and r.ended]
    shares = [min(1.0, r.sampling_seconds / r.seconds) for r in used]
    ends = [float(r.ended or 0.0) for r in used]
    starts = sorted(zip((end - r.seconds for end, r in zip(ends, used, strict=True)), shares, strict=True))
    stops = sorted(zip(ends, shares, strict=True))
    start_times, stop_times = [t for t, _ in starts], [t for t, _ in stops]
    begun, ended = ([0.0, *accumulate(share for _, share in events)] for events in (starts, stops))

    def sampling_at(time: float) -> float:
        return begun[bisect_right(start_times, time)] - ended[bisect_left(stop_times, time)]

    x, y, w = np.ones((len(used), 2)), np.zeros(len(used)), np.zeros(len(used))
    for i, (rollout, end) in enumerate(zip(used, ends, strict=True)):
        times = [end - rollout.seconds * (point + 0.5) / _POINTS for point in range(_POINTS)]
        running = max(1.0, statistics.fmean(map(sampling_at, times)) / engines)
        x[i, 1] = min(running, max_num_seqs)  # the others wait in a queue
        y[i] = rollout.sampling_seconds / rollout.completion_tokens * x[i, 1] / running
        w[i] = rollout.completion_tokens**0.5
    (base, each), *_ = np.linalg.lstsq(x * w[:, None], y * w, rcond=None)
    if min(base, each) < 0:  # one of them explains the times alone
        column = x[:, int(each > 0)] * w
        only = float(column @ (y * w) / (column @ column))
        base, each = (0.0, only) if each > 0 else (only, 0.0)
    return EngineLaw(base=float(base), each=float(each), max_num_seqs=max_num_seqs, update=update)


def fit_laws(
    rollouts: Sequence[RecordedRollout], engine: EngineLaw, *, train_seconds: float, hand_over: float
) -> Laws:
    """Return the laws of a run. Groups are drawn from those that were recorded."""
    groups: dict[int, list[RolloutLaw]] = defaultdict(list)
    for rollout in rollouts:
        turns = max(1, rollout.turns)
        waited = max(0.0, rollout.seconds - rollout.sampling_seconds)
        groups[rollout.group].append(
            RolloutLaw(
                prompt_tokens=1,
                reply_tokens=(max(1, rollout.completion_tokens // turns),) * turns,
                environment_seconds=(waited / turns,) * turns,
                fails=rollout.error is not None,
            )
        )
    recorded = list(groups.values())

    def draw(rng: random.Random, size: int) -> Sequence[RolloutLaw]:
        group = rng.choice(recorded)
        return group if len(group) == size else rng.choices(group, k=size)

    return Laws(engine=engine, draw=draw, train=lambda tokens: train_seconds, hand_over=hand_over)


def simulate_layouts(run: Path, *, steps: int = 12) -> tuple[float, dict[tuple[int, int], Simulated]]:
    """Return the recorded seconds per step of a run, and simulations by engines and `max_async_level`.

    The first is the layout of the run. Raise `UsageError` if the run has too few rollouts.
    """
    config = OrchestratorConfig.model_validate(read_json(run / "configs" / "orchestrator.json"))
    engines, level = len(config.client.base_url), config.max_async_level
    metrics = RunMetrics(read_metrics(run / "metrics.jsonl"))
    recorded = rollout_steps(run)[1:]  # the first step has the start of all processes
    rollouts = [row for step in recorded for row in read_rollouts(run, step)[0] if row.seconds and row.ended]
    if len(rollouts) < _MIN_ROLLOUTS:
        raise UsageError(
            f"{run} has {len(rollouts)} rollouts after its first step; a simulation needs {_MIN_ROLLOUTS}",
            code="BK-RUN-NO-DATA",
            hint="let the run continue for some steps",
        )

    def median(name: str) -> float:
        values = [value for step, value in metrics.values(name).items() if step in recorded]
        return statistics.median(values) if values else 0.0

    inference = next(iter(sorted((run / "configs").glob("inference_*.json"))), None)
    sequences = 128 if inference is None else int(read_json(inference)["max_num_seqs"])
    update = median("orchestrator/time/update_weights")
    engine = fit_engine(rollouts, engines=engines, max_num_seqs=sequences, update=update)
    train, hand_over = median("trainer/seconds"), median("orchestrator/time/write_batch")
    laws = fit_laws(rollouts, engine, train_seconds=train, hand_over=hand_over)
    counts = ((1, 0), (2, 0), (4, 0), (1, 1), (2, 1))
    return median("orchestrator/time/step"), {
        (factor * engines, level + ahead): simulate(
            config.model_copy(update={"max_async_level": level + ahead, "max_steps": None}),
            laws,
            engines=factor * engines,
            steps=steps,
        )
        for factor, ahead in counts
    }
