"""The words and tables of a report: plain text for the terminal, Markdown for the file."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from buckeye.monitor.intervals import Estimate
from buckeye_audit.report.document import markdown_table
from buckeye_audit.report.evaluations import Evaluation
from buckeye_audit.report.floor import PLAYED_PER_CELL
from buckeye_audit.report.gather import Report
from buckeye_audit.report.rows import Row, Side

_NONE = "-"
_HEADER = ("exact match", "tasks", "clusters", "before", "after", "change", "no content")


def exact_table(rows: Sequence[Row]) -> str:
    """Plain aligned text, readable also in a Markdown code block. All but the first column to the right."""
    cells = exact_cells(rows)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in cells
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def exact_cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The cells of `exact_table`, its header first."""
    return [_HEADER, *map(_exact_cells, rows)]


def overview(report: Report) -> list[Row]:
    """The rows that fit on a terminal: families, splits, and all tasks."""
    return [
        *report.part(families=True, splits=False),
        *report.part(families=False, splits=True),
        *report.part(families=False, splits=False),
    ]


def summary(report: Report) -> list[str]:
    """What the figures say, in sentences."""
    (everything,) = report.part(families=False, splits=False)
    sentences = [_overall(everything)]
    parts = [*report.part(families=True, splits=False), *report.part(families=False, splits=True)]
    if report.before is not None and parts:
        for verdict, words in (
            ("rose", "Rose"),
            ("fell", "Fell"),
            ("unclear", "Cannot be told apart from no change"),
        ):
            of_it = [row for row in parts if row.verdict == verdict]
            if of_it:
                sentences.append(f"{words}: {_names(of_it)}.")
    if below := [row for row in parts or [everything] if row.above_floor is False]:
        sentences.append(
            f"After training not clearly above the best policy without content: {_names(below)}."
        )
    return sentences


def markdown(report: Report, pictures: Sequence[tuple[str, str]]) -> str:
    """The whole report. `pictures` are (what it shows, file name)."""
    parts = [f"# {report.name}: held-out tasks before and after training"]
    parts.append("\n".join(f"- {sentence}" for sentence in summary(report)))
    if report.warnings:
        parts.append("\n".join(["**Bear in mind**", "", *(f"- {warning}" for warning in report.warnings)]))
    parts += [f"![{what}]({file})" for what, file in pictures]
    whole = report.part(families=False, splits=False)
    for title, rows in (
        ("By family", report.part(families=True, splits=False)),
        ("By split", report.part(families=False, splits=True)),
        ("By family and split", report.part(families=True, splits=True)),
    ):
        if rows:
            parts.append(
                f"## {title}\n\n{markdown_table(_HEADER, [*map(_exact_cells, [*rows, *whole])], _escaped)}"
            )
    if len(report.rows) == 1:
        parts.append(f"## Exact match\n\n{markdown_table(_HEADER, [*map(_exact_cells, whole)], _escaped)}")
    parts.append(_NOTE)
    if len(report.rows[0].after.pass_at) > 1:
        parts.append(_pass_section(overview(report)))
    parts.append(_detail_section(overview(report)))
    parts.append(_measured_section(report))
    return "\n\n".join(parts) + "\n"


_NOTE = f"""Shares are means over tasks, in per cent with their 95 % interval, changes in percentage points. A
cluster is a set of tasks about the same word (the first of their `lemma_ids`); it counts as one observation.
Changes are those of the tasks of both evaluations, in pairs. *No content* is the exact match of the best
policy that never looks at what is asked (nothing, one string always, the prompt again, all short words, a
random word, the answer of another task), chosen for each row, on up to {PLAYED_PER_CELL} tasks of every
family and split. With so many rows, about one in twenty intervals of a change leaves out 0 by chance."""


def _exact_cells(row: Row) -> tuple[str, ...]:
    return (
        row.label,
        str(row.after.tasks),
        str(row.clusters),
        _share(row.before.exact if row.before is not None else None),
        _share(row.after.exact),
        _change(row.change),
        _percent(row.content_free.exact if row.content_free is not None else None),
    )


def _pass_section(rows: Sequence[Row]) -> str:
    ks = [p.k for p in rows[0].after.pass_at]
    header = ["pass@k, before → after", *(f"k = {k}" for k in ks), "no content, any k"]
    cells = []
    for row in rows:
        olds = [p.value for p in row.before.pass_at] if row.before is not None else [None] * len(ks)
        pairs = zip(olds, row.after.pass_at, strict=True)
        values = [_arrow(_percent(old), _percent(new.value)) for old, new in pairs]
        floor = _percent(row.content_free.exact if row.content_free is not None else None)
        cells.append([row.label, *values, floor])
    note = (
        "Unbiased estimates (Chen et al. 2021, eq. 1) over tasks with at least k scored rollouts. A policy "
        "without content says the same every time."
    )
    return f"## pass@k\n\n{markdown_table(header, cells, _escaped)}\n\n{note}"


def _detail_section(rows: Sequence[Row]) -> str:
    header = ["before → after", "mean reward", "no content", "diacritic misses", "truncated", "errored"]
    cells = []
    for row in rows:
        old, new = row.before, row.after
        cells.append(
            [
                row.label,
                _arrow(_number(old.mean_reward if old else None), _number(new.mean_reward)),
                _number(row.content_free.reward if row.content_free is not None else None),
                _arrow(_percent(old.ortho_miss if old else None), _percent(new.ortho_miss)),
                _arrow(_count(old, lambda side: side.truncated), _count(new, lambda side: side.truncated)),
                _arrow(_count(old, lambda side: side.errored), _count(new, lambda side: side.errored)),
            ]
        )
    note = (
        "Diacritic misses are rollouts with the right word in a wrong spelling, where the environment counts "
        "them. Truncated and errored rollouts are out of all that were played; errored ones have no reward."
    )
    return f"## Rewards and what went wrong\n\n{markdown_table(header, cells, _escaped)}\n\n{note}"


def _measured_section(report: Report) -> str:
    arguments = f"`{json.dumps(dict(report.args), ensure_ascii=False)}`" if report.args else "none"
    lines = [f"- Environment `{report.env_id}`, arguments {arguments}."]
    if report.content_hash is not None:
        lines.append(f"- Hash of its content: `{report.content_hash}`.")
    if report.before is not None:
        lines.append(f"- Before: {_how(report.before)}")
    lines.append(f"- After: {_how(report.after)}")
    if report.training is not None and report.training.floor is not None:
        lines.append(
            f"- While training, the best policy without content would earn {report.training.floor:.3f}."
        )
    return "\n".join(["## How it was measured", "", *lines])


def _how(evaluation: Evaluation) -> str:
    measured = evaluation.measured
    sampling = measured.get("sampling", {})
    temperature = sampling.get("temperature")
    decoding = "sampling not recorded" if temperature is None else f"temperature {temperature:g}"
    if temperature == 0:
        decoding = "greedy"
    each = max(task.played for task in evaluation.tasks.values())
    return (
        f"{evaluation.label}; split `{measured.get('split', 'not recorded')}`, "
        f"{len(evaluation.tasks)} tasks, {each} rollout{'s' * (each > 1)} of each, {decoding}, at most "
        f"{sampling.get('max_tokens', 'an unknown number of')} tokens a reply."
    )


def _overall(row: Row) -> str:
    after = row.after.exact
    if after is None:
        return "No rollout of the evaluation after training could be scored."
    floor = f"; without content {row.content_free.exact:.1%}" if row.content_free is not None else ""
    if row.before is None or row.before.exact is None or row.change is None:
        return f"Exact match on {after.n} tasks: {_interval(after)}{floor}."
    change = row.change
    verb = {
        "rose": "rose",
        "fell": "fell",
        "unclear": "cannot be told apart from where it was: it went",
    }[row.verdict]
    return (
        f"Exact match on {change.n} tasks {verb} from {row.before.exact.value:.1%} to {after.value:.1%}"
        f" (change {100 * change.value:+.1f} points, 95 % interval {100 * change.low:+.1f} to "
        f"{100 * change.high:+.1f}{floor})."
    )


def _interval(estimate: Estimate) -> str:
    return f"{estimate.value:.1%} (95 % interval {estimate.low:.1%} to {estimate.high:.1%})"


def _names(rows: Sequence[Row]) -> str:
    return ", ".join(row.label for row in rows)


def _share(estimate: Estimate | None) -> str:
    if estimate is None:
        return _NONE
    low, high = 100 * estimate.low, 100 * estimate.high
    return f"{100 * estimate.value:.1f} [{low:.1f}, {high:.1f}]"


def _change(estimate: Estimate | None) -> str:
    if estimate is None:
        return _NONE
    low, high = 100 * estimate.low, 100 * estimate.high
    return f"{100 * estimate.value:+.1f} [{low:+.1f}, {high:+.1f}]"


def _percent(value: float | None) -> str:
    return _NONE if value is None else f"{100 * value:.1f}"


def _number(value: float | None) -> str:
    return _NONE if value is None else f"{value:.3f}"


def _count(side: Side | None, of: Callable[[Side], int]) -> str:
    return _NONE if side is None else f"{of(side)}/{side.rollouts}"


def _arrow(before: str, after: str) -> str:
    return after if before == _NONE else f"{before} → {after}"


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|").replace("*", "\\*")
