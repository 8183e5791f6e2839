"""Metrics of a run for the page's charts: one column per metric, one value per step."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from buckeye.base.storage import read_json, step_directories
from buckeye.errors import UsageError
from buckeye.monitor.intervals import mean_over_tasks
from buckeye.monitor.metrics import RECORD_KEYS, StepMetrics
from buckeye.ui.run_catalog import OpenRun

CHARTS: Mapping[str, Sequence[tuple[str, str, tuple[str, ...]]]] = {
    "Stability": (
        ("Entropy", "nats/token", ("trainer/entropy", "trainer/entropy_fresh")),
        (
            "Mismatch of sampler and trainer",
            "KL, nats/token",
            ("trainer/mismatch_kl", "trainer/mismatch_kl_fresh", "trainer/weights/served_kl"),
        ),
        (
            "Left out of the loss",
            "share",
            ("trainer/masked_low", "trainer/masked_high", "trainer/clipped"),
        ),
        ("Gradient norm", "", ("*/grad_norm",)),
        ("Effective sample size", "share", ("trainer/effective_sample_size",)),
        ("Learning rate", "", ("*/lr",)),
        ("Loss", "", ("*/loss", "validation/*")),
    ),
    "Rollouts": (
        (
            "Groups without spread",
            "share",
            ("orchestrator/batch/solve_none", "orchestrator/batch/solve_all", "orchestrator/batch/alike"),
        ),
        ("Length", "tokens", ("orchestrator/completion_len/mean", "orchestrator/completion_len/max")),
        ("Cut off", "share", ("orchestrator/is_truncated/mean",)),
        ("Dropped groups", "groups", ("orchestrator/groups/dropped_*",)),
        (
            "Not trained on",
            "rollouts",
            (
                "orchestrator/rollouts/dropped",
                "orchestrator/rollouts/failed",
                "orchestrator/rollouts/errored",
            ),
        ),
        ("Staleness", "versions", ("trainer/staleness_mean", "trainer/staleness_max")),
        ("Components of the reward", "", ("orchestrator/metrics/*",)),
        ("Environments", "mean reward, with dropped groups", ("orchestrator/env/*/reward/played",)),
    ),
    "Performance": (
        (
            "Idle time",
            "share of the time",
            ("trainer/idle_ratio", "orchestrator/sampler/idle_ratio"),
        ),
        (
            "Throughput",
            "tokens/s",
            (
                "orchestrator/perf/throughput",
                "orchestrator/sampler/tokens_per_second",
                "sft/tokens_per_second",
            ),
        ),
        (
            "A step of the trainer",
            "s",
            ("trainer/time/wait", "trainer/time/compute", "trainer/time/publish", "trainer/time/checkpoint"),
        ),
        (
            "A step of the orchestrator",
            "s",
            (
                "orchestrator/time/wait_for_rollouts",
                "orchestrator/time/wait_for_weights",
                "orchestrator/time/evaluate",
                "orchestrator/time/loop_held_up",
            ),
        ),
        (
            "A rollout",
            "s",
            ("orchestrator/time/rollout/sampling/mean", "orchestrator/time/rollout/environment/mean"),
        ),
        ("Memory", "GiB", ("*/peak_memory_gib",)),
    ),
}
"""Charts of the overview by section: title, unit, and metric names, where `*` matches any text."""

LABELS = {
    "trainer/entropy_fresh": "current weights",
    "trainer/mismatch_kl": "all tokens",
    "trainer/mismatch_kl_fresh": "current weights",
    "trainer/weights/served_kl": "as served",
    "trainer/masked_low": "too unlikely",
    "trainer/masked_high": "too likely",
    "orchestrator/batch/solve_none": "all fail",
    "orchestrator/batch/solve_all": "all pass",
    "orchestrator/batch/alike": "same words",
    "orchestrator/completion_len/mean": "mean",
    "orchestrator/completion_len/max": "longest",
    "orchestrator/is_truncated/mean": "cut off",
    "trainer/staleness_mean": "mean",
    "trainer/staleness_max": "oldest",
    "trainer/idle_ratio": "trainer",
    "orchestrator/sampler/idle_ratio": "engines",
    "orchestrator/perf/throughput": "whole run",
    "orchestrator/sampler/tokens_per_second": "sampled",
    "orchestrator/time/rollout/sampling/mean": "sampling",
    "orchestrator/time/rollout/environment/mean": "environment",
}
"""Labels of chart lines whose metric names are not clear enough."""
_BEGINNINGS = re.compile(r"^[^/]+/(?:time/|metrics/|rollouts/|groups/dropped_|env/(?=.*/reward/played$))?")
_ENDINGS = re.compile(r"/reward/played$")

_MOST_SERIES = 8  # of one chart
_ENOUGH_GROUPS = 2


def names_in(steps: Sequence[StepMetrics]) -> list[str]:
    """Return all recorded metric names, such as `trainer/loss`, in alphabetical order."""
    keys: dict[str, set[str]] = defaultdict(set)
    for step in steps:
        for process, record in step.records.items():
            keys[process].update(record)
    return sorted(f"{process}/{name}" for process, known in keys.items() for name in known - set(RECORD_KEYS))


def overview(run: OpenRun) -> dict[str, Any]:
    """Return the charts of the overview that have data, with steps, rewards and evaluations."""
    steps = run.steps
    names = names_in(steps)
    sections = [
        {"title": section, "charts": [chart for column in charts if (chart := _chart(steps, names, *column))]}
        for section, charts in CHARTS.items()
    ]
    return {
        "steps": [step.number for step in steps],
        "times": [_time(step) for step in steps],
        "trained": [step.trained is not None for step in steps],
        "reward": [step.reward for step in steps],
        "sections": [section for section in sections if section["charts"]],
        "evaluations": list(_evaluations(run.path)),
        "names": names,
    }


def _chart(
    steps: Sequence[StepMetrics], names: Sequence[str], title: str, unit: str, patterns: Sequence[str]
) -> dict[str, Any] | None:
    wanted = [name for pattern in patterns for name in names if fnmatchcase(name, pattern)]
    found = columns(steps, wanted[:_MOST_SERIES])
    if not found:
        return None
    for column in found:
        shorter = _ENDINGS.sub("", _BEGINNINGS.sub("", column["name"]))
        column["label"] = LABELS.get(column["name"], shorter.replace("_", " "))
    return {"title": title, "unit": unit, "series": found, "more": max(0, len(wanted) - _MOST_SERIES)}


def columns(steps: Sequence[StepMetrics], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the values of metrics, one per step. Metrics without any number are left out."""
    found = [{"name": name, "values": [step.value(name) for step in steps]} for name in names]
    return [column for column in found if any(value is not None for value in column["values"])]


def matching_metrics(run: OpenRun, pattern: str, most: int) -> dict[str, Any]:
    """Return the metrics with names that match a regular expression. Raise `UsageError` if it is invalid."""
    try:
        looked_for = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise UsageError(
            f"{pattern!r} is not a regular expression: {error}", code="BK-CLI-ARGUMENT"
        ) from None
    steps = run.steps
    names = [name for name in names_in(steps) if looked_for.search(name)]
    series = columns(steps, names[: max(0, most)])
    return {"steps": [step.number for step in steps], "found": len(names), "series": series}


def _time(step: StepMetrics) -> float | None:
    record = step.trained or next(iter(step.records.values()), {})
    found = record.get("time")
    return float(found) if isinstance(found, int | float) else None


def _evaluations(run: Path) -> Iterator[dict[str, Any]]:
    """Yield every evaluation: step, environment, mean reward, and pass rate with its interval."""
    for step, folder in sorted(step_directories(run / "evals").items()):
        for path in sorted(folder.glob("*.json")):
            try:
                found = read_json(path)
            except (OSError, ValueError):
                continue
            if isinstance(found, dict):
                kept = {name: found.get(name) for name in ("mean_reward", "exact", "ci95", "n", "errored")}
                yield {"step": step, "env": path.stem, **kept}


def reward_intervals(run: OpenRun) -> dict[str, Any]:
    """Return the 95 % interval of each batch's mean reward. Groups count as the independent observations."""
    means: dict[int, list[float]] = defaultdict(list)
    with run.read() as opened:
        for step, mean in opened.query(_MEANS):
            means[step].append(mean)
    steps, low, high = [], [], []
    known: dict[int, tuple[float, float, float]] = run.cache.setdefault("intervals", {})
    for step, values in sorted(means.items()):
        if len(values) < _ENOUGH_GROUPS:
            continue
        total = sum(values) + len(values)
        if step not in known or known[step][0] != total:
            found = mean_over_tasks(values, range(len(values)))
            known[step] = (total, found.low, found.high)
        steps.append(step)
        low.append(known[step][1])
        high.append(known[step][2])
    return {"steps": steps, "low": low, "high": high}


_MEANS = (
    "SELECT step, avg(reward) FROM rollouts WHERE split = 'train' AND dropped IS NULL AND retried = 0 "
    "AND reward IS NOT NULL GROUP BY step, env, grp"
)


def sparkline(steps: Sequence[StepMetrics], points: int = 60) -> list[float]:
    """Return the reward in at most `points` values, each a mean over an equal number of steps."""
    rewards = [step.reward for step in steps if step.reward is not None]
    size = max(1, -(-len(rewards) // points))
    return [statistics.fmean(rewards[at : at + size]) for at in range(0, len(rewards), size)]
