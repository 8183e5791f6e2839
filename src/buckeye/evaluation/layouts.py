"""Forecast of a run with other layouts: laws are fitted to its rollouts and metrics, and then simulated."""

from __future__ import annotations

import itertools
import random
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from buckeye.base.storage import read_json
from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.errors import UsageError
from buckeye.monitor.metrics import RunMetrics, read_metrics
from buckeye.monitor.rollouts import RecordedRollout, read_rollouts, rollout_steps
from buckeye.orchestrator.simulation import EngineLaw, Laws, RolloutLaw, Simulated, simulate

_MIN_ROLLOUTS = 32
_MIN_STEPS = 12
_SIMULATED_ROLLOUTS = 8000
_TOLD_APART = 0.1
"""Smallest relative range of the number of sequences that shows its effect on their speed."""

Numbers = NDArray[np.float64]


def fit_engine(
    batches: Sequence[Sequence[RecordedRollout]],
    *,
    engines: int,
    max_num_seqs: int,
    update: float = 0.0,
    deterministic: bool = False,
) -> EngineLaw:
    """Return the law of one engine: seconds per token against the number of sequences, by least squares.

    The number of sequences of a call is the mean number of calls that the engine had meanwhile. Deterministic
    sampling answers the calls of a turn when the longest reply is complete, so the longest one counts.
    """
    rows = list[tuple[float, float, float]]()  # seconds since the epoch, and tokens
    for batch in batches:
        for turn in itertools.count():
            calls = [(r.ended - r.seconds, r.calls[turn]) for r in batch if r.ended and turn < len(r.calls)]
            if not calls:
                break
            longest = max(call.tokens for _, call in calls)
            rows += [
                (began + call.sent, began + call.answered, longest if deterministic else call.tokens)
                for began, call in calls
                if call.has_duration
            ]
    starts, ends, tokens = np.array(rows).T
    running = np.maximum(1.0, _mean_overlap(starts, ends) / engines)
    sampled = np.minimum(running, max_num_seqs)  # the others wait in the engine
    seconds = (ends - starts) / tokens * sampled / running
    base, each = _fit_step_seconds(sampled, seconds, tokens**0.5)
    return EngineLaw(base=base, each=each, max_num_seqs=max_num_seqs, update=update)


def _mean_overlap(starts: Numbers, ends: Numbers) -> Numbers:
    """Return the mean number of intervals, itself included, that are open during each interval."""
    times = np.concatenate([starts, ends])
    order = np.argsort(times)
    times = times[order]
    open_after = np.cumsum(np.where(order < len(starts), 1, -1))
    area = np.concatenate([[0.0], np.cumsum(open_after[:-1] * np.diff(times))])
    return (np.interp(ends, times, area) - np.interp(starts, times, area)) / (ends - starts)


def _fit_step_seconds(running: Numbers, seconds: Numbers, weights: Numbers) -> tuple[float, float]:
    """Return a constant and a factor of `running`, neither of them negative, that explain `seconds` best.

    If `running` hardly varies, its effect is unknown, and the constant explains all.
    """
    x, y = np.stack([np.ones_like(running), running], axis=1) * weights[:, None], seconds * weights
    alone = [float(column @ y / (column @ column)) for column in x.T]
    if np.ptp(running) < _TOLD_APART * running.mean():
        return alone[0], 0.0
    (base, each), *_ = np.linalg.lstsq(x, y, rcond=None)
    if min(base, each) >= 0:
        return float(base), float(each)
    errors = [np.square(column * factor - y).sum() for column, factor in zip(x.T, alone, strict=True)]
    return (alone[0], 0.0) if errors[0] <= errors[1] else (0.0, alone[1])


def fit_laws(
    rollouts: Sequence[RecordedRollout], engine: EngineLaw, *, train_seconds: float, hand_over: float
) -> Laws:
    """Return the laws of a run. Groups are drawn from those that were recorded."""
    groups: dict[int, list[RolloutLaw]] = defaultdict(list)
    for rollout in rollouts:
        answered = [0.0, *(call.answered for call in rollout.calls)]
        asked = [*(call.asked for call in rollout.calls), rollout.seconds]
        waits = (max(0.0, end - start) for start, end in zip(answered, asked, strict=True))
        groups[rollout.group].append(
            RolloutLaw(
                prompt_tokens=1,
                reply_tokens=tuple(max(1, call.tokens) for call in rollout.calls),
                environment_seconds=tuple(waits),
                fails=rollout.error is not None,
            )
        )
    recorded = list(groups.values())

    def draw(rng: random.Random, size: int) -> Sequence[RolloutLaw]:
        group = rng.choice(recorded)
        return group if len(group) == size else rng.choices(group, k=size)

    return Laws(engine=engine, draw=draw, train=lambda tokens: train_seconds, hand_over=hand_over)


def simulate_layouts(run: Path) -> tuple[float, dict[tuple[int, int], Simulated]]:
    """Return the mean seconds per step of a run, and simulations by engines and `max_async_level`.

    The first is the layout of the run. Raise `UsageError` if the run has too few rollouts.
    """
    config = OrchestratorConfig.model_validate(read_json(run / "configs" / "orchestrator.json"))
    engines, level = len(config.client.base_url), config.max_async_level
    metrics = RunMetrics(read_metrics(run / "metrics.jsonl"))
    # the first step has the start of all processes, and the last one waits for the slowest rollouts
    recorded = rollout_steps(run)[1:-1]
    batches = [[r for r in read_rollouts(run, step)[0] if r.seconds and r.ended] for step in recorded]
    rollouts = [row for batch in batches for row in batch]
    useful = sum(any(call.has_duration for call in row.calls) for row in rollouts)
    if useful < _MIN_ROLLOUTS:
        raise UsageError(
            f"{run} has {useful} rollouts with timed calls in its inner steps; {_MIN_ROLLOUTS} are needed",
            code="BK-RUN-NO-DATA",
            hint="let the run continue for some steps",
        )

    def recorded_values(name: str) -> list[float]:
        return [value for step, value in metrics.values(name).items() if step in recorded]

    def median(name: str) -> float:
        return statistics.median(recorded_values(name) or [0.0])

    inference = next(iter(sorted((run / "configs").glob("inference_*.json"))), None)
    sequences = 128 if inference is None else int(read_json(inference)["max_num_seqs"])
    update = median("orchestrator/time/update_weights")
    deterministic = median("orchestrator/sampler/deterministic") > 0
    engine = fit_engine(
        batches, engines=engines, max_num_seqs=sequences, update=update, deterministic=deterministic
    )
    train, hand_over = median("trainer/seconds"), median("orchestrator/time/write_batch")
    laws = fit_laws(rollouts, engine, train_seconds=train, hand_over=hand_over)
    counts = ((1, 0), (2, 0), (4, 0), (1, 1), (2, 1))
    steps = max(_MIN_STEPS, _SIMULATED_ROLLOUTS // config.batch_rollouts)
    return statistics.fmean(recorded_values("orchestrator/time/step") or [0.0]), {
        (factor * engines, level + ahead): simulate(
            config.model_copy(update={"max_async_level": level + ahead, "max_steps": None}),
            laws,
            engines=factor * engines,
            steps=steps,
            deterministic=deterministic and level + ahead == 0,
        )
        for factor, ahead in counts
    }
