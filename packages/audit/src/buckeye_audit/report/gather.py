"""From the files of a run to the figures of its report."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from buckeye.base.storage import read_json, step_directories
from buckeye.envs.base import Environment
from buckeye.envs.registry import load_environment
from buckeye.errors import UsageError
from buckeye.monitor.intervals import Estimate
from buckeye.monitor.metrics import read_run
from buckeye.orchestrator.environments import short_name
from buckeye_audit.report.evaluations import Evaluation, evaluation_in, evaluations_of_run
from buckeye_audit.report.floor import (
    ContentFree,
    FloorTable,
    evaluated_floor,
    make_content_free,
    training_floor,
)
from buckeye_audit.report.rows import FEW_CLUSTERS, Row, exact_by_split, make_rows

Curve = Mapping[int, Mapping[str | None, Estimate]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportRequest:
    """What to report on: `run` alone, or `after` with or without `before` and `run`. `args` replace the
    environment arguments that the evaluation was made with. Without `baseline` the environment is not loaded,
    and policies without content are not played."""

    env_id: str
    run: Path | None = None
    before: Path | None = None
    after: Path | None = None
    args: Mapping[str, Any] | None = None
    baseline: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """Mean reward of the rollouts played for each step of a run, and what a policy without content earns."""

    rewards: Mapping[int, float]
    floor: float | None
    environments: Sequence[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Everything that is shown. `curve` has a point for every evaluated step of a run; `warnings` say what
    the reader has to bear in mind."""

    name: str
    env_id: str
    args: Mapping[str, Any]
    content_hash: str | None
    before: Evaluation | None
    after: Evaluation
    rows: Sequence[Row]
    curve: Curve
    training: Training | None
    warnings: Sequence[str]

    def part(self, *, families: bool, splits: bool) -> list[Row]:
        """The rows that are about one family, one split, one of both, or all tasks."""
        return [r for r in self.rows if (r.family is not None, r.split is not None) == (families, splits)]


def make_report(request: ReportRequest) -> Report:
    """Read, load the environment, and compute. Raises UsageError if there is nothing to report on."""
    during, before, after = _evaluations(request)
    args = dict(after.measured.get("args", {}) if request.args is None else request.args)
    env_id = _loadable_id(request.env_id, after)
    environment = load_environment(env_id, **args) if request.baseline else None
    content_free = asyncio.run(make_content_free(environment)) if environment is not None else None
    floors = asyncio.run(evaluated_floor(content_free, after)) if content_free is not None else None
    order: Sequence[str] = getattr(environment, "splits", ())
    rows = make_rows(before, after, floors, order)
    return Report(
        name=after.file.stem,
        env_id=env_id,
        args=args,
        content_hash=_content_hash(environment),
        before=before,
        after=after,
        rows=rows,
        curve={e.step: exact_by_split(e, order) for e in during if e.step is not None},
        training=_training(request, env_id, args, content_free) if request.run is not None else None,
        warnings=_warnings(before, after, rows, floors),
    )


def _evaluations(request: ReportRequest) -> tuple[list[Evaluation], Evaluation | None, Evaluation]:
    """All evaluations of the run; the one before; the one after."""
    env_id = request.env_id
    if request.after is not None:
        given = evaluation_in(request.before, env_id, "--before") if request.before is not None else None
        during = _curve_of(request.run, env_id) if request.run is not None else []
        return during, given, evaluation_in(request.after, env_id, "--after")
    if request.before is not None:
        raise UsageError("--before needs --after: the output directory of `evals` with the trained model")
    if request.run is None:
        raise UsageError("give --run DIR (a run of `rl` with evaluations), or --before DIR and --after DIR")
    during = evaluations_of_run(request.run, env_id)
    return during, during[0] if len(during) > 1 else None, during[-1]


def _curve_of(run: Path, env_id: str) -> list[Evaluation]:
    """The run's evaluations; none is fine for a directory whose reward curve is wanted."""
    if run.is_dir() and not step_directories(run / "evals"):
        return []
    return evaluations_of_run(run, env_id)


def _loadable_id(env_id: str, evaluation: Evaluation) -> str:
    """`env_id`, unless that is only the name under which another id was evaluated."""
    measured = str(evaluation.measured.get("id", env_id))
    return env_id if _same(env_id, measured) else measured


def _same(one: str, other: str) -> bool:
    return canonicalize_name(short_name(one)) == canonicalize_name(short_name(other))


def _content_hash(environment: Environment | None) -> str | None:
    value = getattr(environment, "content_hash", None)
    value = value() if callable(value) else value
    return None if value is None else str(value)


def _training(
    request: ReportRequest, env_id: str, args: Mapping[str, Any], content_free: ContentFree | None
) -> Training | None:
    """None if the run has not finished a step. The floor is known if it trains on this environment alone;
    `content_free` is for the environment built with `args`, those of the evaluation; None where there is to
    be no floor."""
    assert request.run is not None
    rewards = read_run(request.run / "metrics.jsonl").values("orchestrator/reward/played")
    if not rewards:
        return None
    trained, floor = _trained_environments(request.run), None
    if content_free is not None and len(trained) == 1 and _same(str(trained[0]["id"]), env_id):
        own = trained[0]["args"] if request.args is None else request.args
        if own != args:
            content_free = asyncio.run(make_content_free(load_environment(env_id, **own)))
        floor = asyncio.run(training_floor(content_free))
    names = [str(env.get("name") or short_name(str(env["id"]))) for env in trained]
    return Training(rewards=rewards, floor=floor, environments=names)


def _trained_environments(run: Path) -> list[Mapping[str, Any]]:
    try:
        return list(read_json(run / "configs" / "rl.json")["orchestrator"]["env"])
    except (OSError, ValueError, KeyError, TypeError):
        return []  # the processes were started by hand


def _warnings(
    before: Evaluation | None, after: Evaluation, rows: Sequence[Row], floors: FloorTable | None
) -> list[str]:
    found = []
    if before is None:
        found.append("There is one evaluation only, so nothing is said about a change.")
    else:
        found += _differences(before, after)
    for what, evaluation in (("before", before), ("after", after)):
        errored = sum(task.errored for task in evaluation.tasks.values()) if evaluation is not None else 0
        if errored:
            found.append(
                f"{errored} rollouts {what} ended with an error. They have no reward and are left out."
            )
    if thin := [f"{row.label} ({row.clusters})" for row in rows if row.thin]:
        found.append(
            f"Fewer than {FEW_CLUSTERS} clusters of related tasks, or most tasks in one of them, so little "
            f"is known about: {', '.join(thin)}."
        )
    if floors is not None and floors.missing:
        found.append(
            f"{floors.missing} of the {len(after.tasks)} evaluated tasks are not in the environment as it is "
            "installed now. The policies without content were measured on the others."
        )
    return found


def _differences(before: Evaluation, after: Evaluation) -> list[str]:
    """Where two evaluations cannot simply be compared."""
    found = []
    for key in ("id", "args", "split", "sampling", "seq_len"):
        old, new = before.measured.get(key), after.measured.get(key)
        if old != new:
            found.append(f"The evaluations differ in `{key}`: {old} before, {new} after.")
    common = len(before.tasks.keys() & after.tasks.keys())
    if not common == len(before.tasks) == len(after.tasks):
        found.append(
            f"The evaluations have {common} tasks in common, of {len(before.tasks)} before and "
            f"{len(after.tasks)} after. The change is that of the common ones."
        )
    return found
