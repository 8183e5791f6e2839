"""All pictures: of `rl report`, `buckeye env report` and the demonstration. matplotlib is imported only here,
and late. A function makes a figure; `rendered` makes a file of it."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from buckeye.base.json_lines import printable
from buckeye.monitor.intervals import Estimate
from buckeye_audit.bands.band import Band
from buckeye_audit.report.rows import ALL, Row, Side

_AFTER, _BEFORE, _FLOOR = "#b0413e", "#b9c4cd", "#333333"
_FLOOR_LABEL = "best policy without content"
_COLORS = (_AFTER, "#3f6c8f", "#8a8f3c", "#7b5ea7")
_MOST_COLUMNS = 4
_SMOOTHED = 9

Panel = tuple[str, Mapping[str, Mapping[int, float]]]
"""A title, and by their names the curves below it: step -> value. A name may be empty."""


def exact_curves(
    points: Mapping[int, Mapping[str | None, Estimate]], floors: Mapping[str | None, float], title: str
) -> Any:
    """Exact match over steps, one panel for all tasks and one for every split: step -> split -> estimate."""
    splits = list(dict.fromkeys(split for at in points.values() for split in at))
    rows = math.ceil(len(splits) / _MOST_COLUMNS)
    columns = math.ceil(len(splits) / rows)
    width, height = (7.0, 4.2) if len(splits) == 1 else (3.2 * columns, 2.5 * rows + 0.9)
    figure, grid = _figure(rows, columns, (width, height))
    panels = [axes for line in grid for axes in line]
    for axes, split in zip(panels, splits, strict=False):
        steps = sorted(step for step, at in points.items() if split in at)
        at = [points[step][split] for step in steps]
        _band(axes, dict(zip(steps, at, strict=True)))
        axes.plot(steps, [e.value for e in at], color=_AFTER, linewidth=2, marker="o", markersize=4)
        if split in floors:
            axes.axhline(floors[split], color=_FLOOR, linewidth=1.2, linestyle="--")
        axes.set_title(_plain(split or ALL), fontsize=10, loc="left")
        axes.set_ylim(-0.03, 1.03)
        _over_steps(axes)
        _percent(axes.yaxis)
    for axes in panels[len(splits) :]:
        axes.set_visible(False)
    figure.supxlabel("step", fontsize=10)
    figure.supylabel("exact match", fontsize=10)
    policy = [_line(_AFTER, "policy, with 95 % interval")]
    _legend(figure, title, policy + ([_line(_FLOOR, _FLOOR_LABEL, "--")] if floors else []))
    return figure


def before_after_bars(rows: Sequence[Row], title: str) -> Any:
    """Exact match before and after for each row, with intervals, and a mark where a policy without content
    is."""
    figure, grid = _figure(1, 1, (7.5, 1.5 + 0.52 * max(len(rows), 2)))
    axes = grid[0][0]
    for index, row in enumerate(rows):
        sides = [(row.before, -0.19, _BEFORE), (row.after, 0.19, _AFTER)]
        for side, offset, color in sides:
            _bar(axes, index + offset, side, color)
        if row.content_free is not None:
            mark = {"color": _FLOOR, "linewidth": 1.6, "linestyles": (0, (2, 1))}
            axes.vlines(row.content_free.exact, index - 0.42, index + 0.42, **mark)
    axes.set_yticks(range(len(rows)), [_plain(f"{row.label}  (n = {row.after.tasks})") for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(-0.01, 1.01)
    axes.tick_params(axis="y", length=0)
    _percent(axes.xaxis)
    axes.grid(axis="x", color="#e6e6e6", linewidth=0.8)
    axes.set_xlabel("exact match, with 95 % intervals")
    handles = [_patch(_BEFORE, "before")] if any(row.before for row in rows) else []
    handles.append(_patch(_AFTER, "after"))
    if any(row.content_free for row in rows):
        handles.append(_line(_FLOOR, _FLOOR_LABEL, "--"))
    _legend(figure, title, handles)
    return figure


def training_reward(
    rewards: Mapping[int, float],
    floor: float | None,
    title: str,
    intervals: Mapping[int, Estimate] | None = None,
    recipe: Band | None = None,
) -> Any:
    """Mean reward of all rollouts played for a step, groups without spread included, and its running mean;
    what a policy without content earns as a line, and where runs of the same recipe are as a band."""
    figure, grid = _figure(1, 1, (7.5, 4.2))
    axes = grid[0][0]
    steps = sorted(rewards)
    values = [rewards[step] for step in steps]
    handles = [_line(_AFTER, f"policy, mean of {_SMOOTHED} steps"), _line("#dea8a6", "each step")]
    if intervals:
        _band(axes, intervals)
        handles[1] = _line("#dea8a6", "each step, with 95 % interval")
    axes.plot(steps, values, color=_AFTER, linewidth=0.8, alpha=0.4)
    axes.plot(steps, running_mean(values, _SMOOTHED), color=_AFTER, linewidth=2)
    if recipe is not None:
        axes.fill_between(recipe.steps, recipe.low, recipe.high, color=_BEFORE, alpha=0.3, linewidth=0)
        axes.plot(recipe.steps, recipe.mid, color=_BEFORE, linewidth=1.2, linestyle="--")
        handles.append(_line(_BEFORE, _plain(recipe.label), "--"))
    if floor is not None:
        axes.axhline(floor, color=_FLOOR, linewidth=1.2, linestyle="--")
        handles.append(_line(_FLOOR, _FLOOR_LABEL, "--"))
    axes.set(xlabel="step", ylabel="mean reward of the rollouts")
    axes.set_ylim(min(0.0, *values) - 0.03, max(1.0, *values) + 0.03)
    _over_steps(axes)
    _legend(figure, title, handles)
    return figure


def small_panels(panels: Sequence[Panel], title: str) -> Any:
    """Several figures of a run over its steps, each in a panel of its own."""
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure, grid = _figure(rows, columns, (3.4 * columns, 2.1 * rows + 0.5), sharey=False)
    every = [axes for line in grid for axes in line]
    for axes, (name, curves) in zip(every, panels, strict=False):
        for color, (label, points) in zip(_COLORS, curves.items(), strict=False):
            steps = sorted(points)
            marker = "." if len(steps) < 3 else None
            values = [points[step] for step in steps]
            axes.plot(steps, values, color=color, linewidth=1.4, label=_plain(label), marker=marker)
        axes.set_title(_plain(name), fontsize=10, loc="left")
        axes.tick_params(labelsize=8)
        axes.margins(y=0.12)
        if not any(value for points in curves.values() for value in points.values()):
            axes.set_ylim(-0.05, 1.0)  # matplotlib would make much of nothing
        _over_steps(axes)
        if any(curves):
            axes.legend(fontsize=7.5, frameon=False, handlelength=1.2, labelspacing=0.2)
    for axes in every[len(panels) :]:
        axes.set_visible(False)
    figure.suptitle(_plain(title), fontsize=12, x=0.01, ha="left")
    return figure


def rendered(figure: Any, kind: Literal["png", "svg"]) -> bytes:
    """A figure as a file."""
    from matplotlib import rc_context

    buffer = io.BytesIO()
    metadata = {"Date": None} if kind == "svg" else None
    with warnings.catch_warnings(), rc_context({"svg.hashsalt": "buckeye"}):
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)  # a box is drawn in its place
        figure.savefig(buffer, format=kind, metadata=metadata)
    return buffer.getvalue()


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """The mean of the `width` values around each one; of fewer at the ends."""
    half = width // 2
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def _bar(axes: Any, at: float, side: Side | None, color: str) -> None:
    if side is None:
        return
    if side.exact is None:
        axes.text(0.01, at, "nothing scored", va="center", fontsize=8, color="#777777")
        return
    exact = side.exact
    axes.barh(at, exact.value, height=0.34, color=color)
    ends = [[max(0.0, exact.value - exact.low)], [max(0.0, exact.high - exact.value)]]
    axes.errorbar(exact.value, at, xerr=ends, color="#222222", linewidth=1, capsize=2.5)


def _band(axes: Any, points: Mapping[int, Estimate]) -> None:
    """The intervals of a curve."""
    steps = sorted(points)
    ends = ([points[step].low for step in steps], [points[step].high for step in steps])
    axes.fill_between(steps, *ends, color=_AFTER, alpha=0.15, linewidth=0)


def _over_steps(axes: Any) -> None:
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)


def _plain(text: str) -> str:
    """A label that is no formula, whatever is in it."""
    return printable(text).replace("$", r"\$")


def _figure(rows: int, columns: int, size: tuple[float, float], *, sharey: bool = True) -> tuple[Any, Any]:
    """A figure that belongs to no window system, and its grid of axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=150, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharey=sharey)
    for axes in grid.flat:
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
    return figure, grid


def _percent(axis: Any) -> None:
    from matplotlib.ticker import PercentFormatter

    axis.set_major_formatter(PercentFormatter(1.0))


def _legend(figure: Any, title: str, handles: Sequence[Any]) -> None:
    """Title and legend above the axes, where they cover nothing."""
    text = {"title": _plain(title), "title_fontsize": 12, "alignment": "left", "fontsize": 9}
    figure.legend(handles=handles, loc="outside upper left", ncols=3, frameon=False, **text)


def _line(color: str, label: str, style: str = "-") -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], color=color, linewidth=2 if style == "-" else 1.2, linestyle=style, label=label)


def _patch(color: str, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=color, label=label)
