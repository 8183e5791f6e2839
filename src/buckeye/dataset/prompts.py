"""Make tasks from rows: find the columns of prompts and answers, and hold out rows for evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from buckeye.config.problems import closest, suggestion
from buckeye.dataset.lazy_rows import Row, column_names, make_row
from buckeye.dataset.prompt_tasks import Columns, Kind, PromptTasks
from buckeye.dataset.rows import EVAL, TRAIN, read_splits, row_error, show_row
from buckeye.envs.base import Task
from buckeye.errors import UsageError

Dataset = str | Path | Iterable[Mapping[str, Any]]
"""File, folder or hub id of a dataset; or its rows: a list, a `datasets.Dataset` or a DataFrame."""

PROMPT_COLUMNS = ("prompt", "messages", "question", "problem", "instruction", "query", "input")
"""Names of columns that may have prompts. If a dataset has several, `prompt` or `messages` is used."""
ANSWER_COLUMNS = (
    "answer", "solution", "ground_truth", "target", "label", "expected", "reference", "output", "response",
)  # fmt: skip
"""Names of columns that may have answers. The first one that exists is used."""
_TASK_COLUMNS = {"mcp_config", "evaluate_tool", "setup_tool"}
_HELD_OUT = ("test", "validation")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompts:
    """Tasks of a dataset by split, its columns, and a line that describes both."""

    splits: Mapping[str, PromptTasks]
    columns: Columns
    summary: str
    parts: Sequence[PromptTasks]
    """Tasks of all splits, before some were held out."""

    def tasks(self) -> Iterator[Task]:
        """Yield the tasks of all splits."""
        return chain.from_iterable(self.parts)

    def rows(self) -> Iterator[tuple[Mapping[str, Any], str]]:
        """Yield the data of the row of each task, and its location."""
        return chain.from_iterable(tasks.rows() for tasks in self.parts)


def load_prompts(
    dataset: Dataset,
    *,
    eval_dataset: Dataset | None,
    split: str | None,
    prompt_column: str | None,
    answer_column: str | None,
) -> Prompts:
    """Return the tasks of a dataset on disk, as `read_prompts`, or of rows in memory. Raises UsageError."""
    columns = {"prompt_column": prompt_column, "answer_column": answer_column}
    if isinstance(dataset, str | Path) and (eval_dataset is None or isinstance(eval_dataset, str | Path)):
        eval_source = None if eval_dataset is None else str(eval_dataset)
        return read_prompts(str(dataset), split=split, eval_source=eval_source, **columns)
    if isinstance(dataset, str | Path) or isinstance(eval_dataset, str | Path):
        hint = "pass the path of both, or the rows of both"
        raise UsageError("dataset= and eval_dataset= differ in kind", code="BK-CLI-CONFLICT", hint=hint)
    if split is not None:
        hint = "pass only the rows of this split"
        raise UsageError(f"split={split}: rows have no splits", code="BK-CLI-CONFLICT", hint=hint)
    rows = rows_of_values(dataset, "row")
    if eval_dataset is None or eval_dataset is dataset:
        held_out = None if eval_dataset is None else rows
    else:
        held_out = rows_of_values(eval_dataset, "evaluation row")
    return make_prompts("the dataset", rows, held_out, **columns)


def read_prompts(
    source: str,
    *,
    split: str | None = None,
    eval_source: str | None = None,
    prompt_column: str | None = None,
    answer_column: str | None = None,
) -> Prompts:
    """Return the tasks of a dataset.

    `split` names the rows to train on. Evaluations use the rows of `eval_source`, else the split `test` or
    `validation`, else a tenth of the rows, chosen by a hash of the prompt. Raises UsageError with every row
    that has no usable prompt.
    """
    splits = read_splits(source)
    chosen = _choose_split(source, splits, split)
    rows = splits.pop(chosen)
    held_out = _held_out_rows(splits)
    if eval_source is not None:
        eval_splits = read_splits(eval_source)
        held_out = _held_out_rows(eval_splits) or eval_splits[_choose_split(eval_source, eval_splits, None)]
    return make_prompts(source, rows, held_out, prompt_column=prompt_column, answer_column=answer_column)


def _held_out_rows(splits: Mapping[str, Sequence[Row]]) -> Sequence[Row] | None:
    return next((splits[name] for name in _HELD_OUT if splits.get(name)), None)


def rows_of_values(values: Iterable[Any], name: str) -> list[Row]:
    """Return rows for values in memory; error messages call each row `name`. Raises UsageError."""
    rows = []
    for number, value in enumerate(values, 1):
        at = f"{name} {number}"
        if not isinstance(value, Mapping):
            raise row_error(f"the row is {str(value)[:60]!r}", at, 'write {"prompt": "...", ...}')
        rows.append(make_row({str(column): cell for column, cell in value.items()}, at))
    if not rows:
        raise UsageError("the dataset has no rows", code="BK-DATA-FORMAT", hint="add rows with prompts")
    return rows


def make_prompts(
    source: str,
    rows: Sequence[Row],
    held_out_rows: Sequence[Row] | None,
    *,
    prompt_column: str | None = None,
    answer_column: str | None = None,
) -> Prompts:
    """Return the tasks of rows. Without `held_out_rows`, a tenth of the rows is held out."""
    columns = find_columns(source, rows, prompt_column, answer_column)
    if columns.kind == "tasks":
        raise UsageError(
            f"{source} has tasks of MCP servers, which grade themselves",
            code="BK-DATA-FORMAT",
            hint="leave the reward out, and name the configuration of the environment: --config FILE.yaml",
        )
    tasks = PromptTasks(rows, columns, source)
    parts = [tasks]
    if held_out_rows is None:
        tasks, held_out = tasks.hold_out()
    else:
        held_out = PromptTasks(held_out_rows, columns, source, prefix="eval-")
        parts.append(held_out)
    return Prompts(
        splits={TRAIN: tasks, **({EVAL: held_out} if len(held_out) else {})},
        columns=columns,
        summary=_summary(source, columns, len(tasks), len(held_out)),
        parts=parts,
    )


def find_columns(
    source: str, rows: Sequence[Row], prompt_column: str | None = None, answer_column: str | None = None
) -> Columns:
    """Return the columns of a dataset. Raises UsageError unless exactly one column may have the prompts."""
    names = column_names(rows)
    for flag, wanted in (("prompt_column", prompt_column), ("answer_column", answer_column)):
        if wanted is not None and wanted not in names:
            raise UsageError(
                f"{source} has no column {wanted!r} ({flag})",
                code="BK-DATA-FORMAT",
                hint=suggestion(closest(wanted, names, count=1)) or f"its columns: {', '.join(names)}",
            )
    if prompt_column is None and _has_mcp_tasks(rows, names):
        return Columns(kind="tasks", prompt="prompt", answer=None, others=())
    prompt = prompt_column or _choose_prompt_column(source, rows, names)
    kind: Kind = (
        "chats" if prompt == "messages" and _ends_with_reply(rows[0].values.get(prompt)) else "prompts"
    )
    answer = answer_column or next(
        (name for name in ANSWER_COLUMNS if name in names and name != prompt), None
    )
    if kind == "chats" and answer is None:
        answer = "answer"
    reserved = {prompt, "prompt", "prompts", "completion", "completions"}
    others = [name for name in names if name not in reserved]
    others += [answer] if answer is not None and answer not in names else []
    return Columns(kind=kind, prompt=prompt, answer=answer, others=tuple(others))


def _has_mcp_tasks(rows: Sequence[Row], names: Sequence[str]) -> bool:
    """Return True if the rows are MCP tasks. A column `grade` with texts or numbers is ordinary data."""
    if _TASK_COLUMNS & set(names):
        return True
    return "grade" in names and any(isinstance(row.values.get("grade"), dict | list) for row in rows)


def _choose_prompt_column(source: str, rows: Sequence[Row], names: Sequence[str]) -> str:
    found = [name for name in PROMPT_COLUMNS if name in names]
    if found and (len(found) == 1 or found[0] in PROMPT_COLUMNS[:2]):
        return found[0]
    if found:
        raise UsageError(
            f"{source}: several columns might be the prompt: {', '.join(found)}",
            code="BK-DATA-FORMAT",
            at=rows[0].at,
            hint=f"choose a column: {_column_argument(found[0])}",
        )
    column = names[0] if names else "NAME"
    raise UsageError(
        f"{source}: no column with prompts was found. The first row is\n  {show_row(rows[0])}",
        code="BK-DATA-FORMAT",
        at=rows[0].at,
        hint=f"name the column: {_column_argument(column)}. Expected one of {', '.join(PROMPT_COLUMNS)}, or "
        "tasks of MCP servers (prompt and mcp_config)",
    )


def _column_argument(name: str) -> str:
    return f'`--prompt-column {name}`, or `prompt_column = "{name}"` in `args`'


def _ends_with_reply(messages: Any) -> bool:
    last = messages[-1] if isinstance(messages, list) and messages else None
    return isinstance(last, Mapping) and last.get("role") == "assistant"


def _choose_split(source: str, splits: Mapping[str, Sequence[Row]], wanted: str | None) -> str:
    names = [name for name, rows in splits.items() if rows]
    if wanted is not None:
        if wanted in names:
            return wanted
        hint = suggestion(closest(wanted, names)) or (
            f"choose one of {', '.join(names)}; to evaluate on the rows that a run holds out: {EVAL}"
        )
        raise UsageError(f"{source} has no split {wanted!r}", code="BK-DATA-FORMAT", hint=hint)
    if TRAIN in names or len(names) == 1:
        return TRAIN if TRAIN in names else names[0]
    raise UsageError(
        f"{source} has no split {TRAIN!r}, but {', '.join(names)}",
        code="BK-DATA-FORMAT",
        hint=f"choose one: --split {names[0]}",
    )


def _summary(source: str, columns: Columns, count: int, held_out: int) -> str:
    parts = [f"prompts in `{columns.prompt}`"]
    parts += [f"answers in `{columns.answer}`"] if columns.answer else []
    others = [name for name in columns.others if name != columns.answer]
    parts += [f"other columns: {', '.join(others)}"] if others else []
    kind = columns.kind if count != 1 else columns.kind.removesuffix("s")
    return f"{source}: {count} {kind} to train on, {held_out} held out ({'; '.join(parts)})"
