"""`rl curve`: how a number of one run or of several went, step by step."""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from textwrap import wrap
from typing import Annotated, Any

import typer

from buckeye.base.json_lines import printable
from buckeye.config.problems import closest, did_you_mean
from buckeye.errors import BuckeyeError, UsageError
from buckeye.monitor.metrics import HEAD, RunMetrics, read_run
from buckeye.run_files.known_runs import find_run

# Curves as text, for a terminal or a pipe of any kind.

MARKS = "*ox+#@%&="
WIDTH, HEIGHT = 80, 16

_LABEL = 9


@dataclass(frozen=True, slots=True)
class Curve:
    """Step -> value, and what it is called. It has at least one point."""

    name: str
    points: Mapping[int, float]


def text_plot(curves: Sequence[Curve], *, width: int = WIDTH, height: int = HEIGHT) -> list[str]:
    """Lines of at most `width` characters, of which `height` have marks, one mark a curve; where two meet, it
    is that of the later one. Steps that share a column are shown by their mean."""
    steps = [step for curve in curves for step in curve.points]
    values = [value for curve in curves for value in curve.points.values()]
    first, last, low, high = min(steps), max(steps), min(values), max(values)
    columns = width - _LABEL - 2
    field = [[" "] * columns for _ in range(height)]
    for mark, curve in zip(MARKS, curves, strict=False):
        shared: dict[int, list[float]] = defaultdict(list)
        for step, value in curve.points.items():
            shared[_place(step, first, last, columns)].append(value)
        for column, found in shared.items():
            field[height - 1 - _place(statistics.fmean(found), low, high, height)][column] = mark
    labels = {height - 1: low}
    if high > low:
        labels |= {0: high, (height - 1) // 2: (low + high) / 2}
    lines = []
    for number, row in enumerate(field):
        label = f"{labels[number]:.4g}" if number in labels else ""
        lines.append(f"{label:>{_LABEL}} |{''.join(row)}".rstrip())
    lines.append(f"{'':{_LABEL}} +{'-' * columns}")
    ends = f"{first}{last:>{columns - len(str(first))}}" if last > first else str(first)
    return [*lines, f"{'':{_LABEL}}  {ends}"]


def _place(value: float, low: float, high: float, places: int) -> int:
    """Which of so many places from `low` to `high` a value has."""
    return 0 if high <= low else min(places - 1, int((value - low) / (high - low) * places))


# `rl curve`: how a number of one run or of several went, step by step.

_Named = tuple[Path, Curve]

_REWARD = "reward/mean"
_EVALUATED = re.compile(r"eval/.+/avg@\d+")
_MEAN_OF = 10


def curve(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN ...", help="Directories, names or ids. Default: as for rl status."),
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option("--metric", "-m", metavar="NAME", help="Default: the reward, and that of evaluations."),
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="Only say which metrics there are.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Plot a metric of runs over their steps, in text of 80 columns. Exit code 1 if there is none yet."""
    directories = [find_run(run) for run in runs] if runs else [find_run(None)]
    metrics = {path: read_run(path / "metrics.jsonl") for path in directories}
    names = _names(metrics.values())
    if not names:
        raise BuckeyeError(f"{', '.join(map(str, directories))}: no step is recorded yet")
    if listed:
        print(json.dumps(names) if as_json else "\n".join(map(printable, names)))
        return
    plots = [_asked(metrics, name, names) for name in metric] if metric else [_usual(metrics, names)]
    if as_json:
        print(json.dumps([_as_object(path, one) for plot in plots for path, one in plot]))
    else:
        print("\n\n".join(map(_text, plots)))


def metric_values(run: Path, name: str) -> Mapping[int, float]:
    """Step -> a number of a run, named as here. Raises UsageError if it has none of that name."""
    metrics = read_run(run / "metrics.jsonl")
    return _asked({run: metrics}, name, _names([metrics]))[0][1].points


def _names(runs: Iterable[RunMetrics]) -> list[str]:
    """The numbers that there are: by their own name, with that of the process where two processes have it."""
    records = [item for run in runs for step in run.steps() for item in step.records.items()]
    found = {
        (process, name)
        for process, record in records
        for name, value in record.items()
        if name not in HEAD and isinstance(value, int | float)
    }
    times = Counter(name for _, name in found)
    return sorted(name if times[name] == 1 else f"{process}/{name}" for process, name in found)


def _asked(metrics: Mapping[Path, RunMetrics], name: str, names: Sequence[str]) -> list[_Named]:
    """The curves of one metric. Raises UsageError if no run has it."""
    found = _curves(metrics, [name])
    if found and not (doubled := [known for known in names if known.partition("/")[2] == name]):
        return found
    if found:
        raise UsageError(f"--metric {name}: several processes have it. Say whose: {', '.join(doubled)}")
    hint = did_you_mean(closest(name, names))
    raise UsageError(f"--metric {name}: there is no such number.{hint} `rl curve RUN --list` shows all.")


def _usual(metrics: Mapping[Path, RunMetrics], names: Sequence[str]) -> list[_Named]:
    """The reward with that of the evaluations; the loss, and that of the validation, of supervised
    fine-tuning."""
    evaluated = [name for name in names if _EVALUATED.fullmatch(name)]
    return _curves(metrics, [_REWARD, *evaluated]) or _curves(metrics, ["loss", "val_loss"])


def _curves(metrics: Mapping[Path, RunMetrics], names: Sequence[str]) -> list[_Named]:
    """Those that have points, run by run."""
    found = [(path, Curve(name, run.values(name))) for path, run in metrics.items() for name in names]
    return [(path, one) for path, one in found if one.points]


def _text(plot: Sequence[_Named]) -> str:
    """The plot, and what its marks mean."""
    shown = plot[: len(MARKS)]
    several = len({path for path, _ in plot}) > 1
    lines = text_plot([one for _, one in shown])
    for mark, (path, one) in zip(MARKS, shown, strict=False):
        name = f"{path.absolute().name}: {one.name}" if several else one.name
        legend = f"{mark} {printable(name)}: {_summary(list(one.points.values()))}"
        lines += wrap(legend, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    if len(plot) > len(shown):
        lines.append(f"({len(plot) - len(shown)} more curves are not drawn; --json has them)")
    return "\n".join(lines)


def _summary(values: Sequence[float]) -> str:
    if len(values) < 2 * _MEAN_OF:
        return f"{values[0]:.4g} at first, {values[-1]:.4g} at last, {len(values)} values"
    first, last = (fmean(part) for part in (values[:_MEAN_OF], values[-_MEAN_OF:]))
    return f"{first:.4g} at first, {last:.4g} at last (means of ten), {len(values)} values"


def _as_object(path: Path, one: Curve) -> dict[str, Any]:
    steps, values = list(one.points), list(one.points.values())
    return {"run": str(path), "metric": one.name, "steps": steps, "values": values}
