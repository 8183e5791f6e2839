"""Task files as dataset rows: checks, inferred fields and splits."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from buckeye.base.columns import counted
from buckeye.errors import UsageError
from buckeye.mcp.tasks.lock_file import EnvironmentLock
from buckeye.mcp.tasks.task_files import TaskRow, parse_tasks, read_task_rows
from buckeye.mcp.tasks.task_schema import HttpServer, McpTask
from buckeye.mcp.workdir.initial_files import resolve_files

COLUMNS = ("id", "prompt", "mcp_config", "setup_tool", "evaluate_tool", "metadata")
GRADE, FILES = "grade", "files"
"""Extra columns of datasets whose tasks have graders or files."""
NESTED = COLUMNS[2:]
"""Columns with JSON texts, like `grade`. A missing value is null."""
TRAIN, TEST = "train", "test"
_EVAL_SPLITS = ("eval", "test")
_GATEWAY = "http://localhost:8765/mcp"
_SECRET = re.compile(
    r"(authorization|cookie|token|secret|password|passwd|credential|api[_-]?key|_key$|^key$)", re.I
)
_VARIABLE = re.compile(r"\$[A-Za-z_{]")


def gateway_config(lock: EnvironmentLock) -> dict[str, Any]:
    """Return the `mcp_config` for the environment of a lock file: `buckeye gateway` on this machine.

    The key has a default, because a gateway may not require a key.
    """
    headers = {"Authorization": "Bearer ${BUCKEYE_API_KEY:-none}", "Mcp-Image": lock.image_name.tagged}
    return {"buckeye": {"url": _GATEWAY, "headers": headers}}


def read_with_lock(path: Path, lock: EnvironmentLock | None) -> tuple[list[McpTask], int]:
    """Return the tasks of a file, and the number of tasks whose `mcp_config` came from the lock.

    Raises UsageError with every problem, including keys as plain text.
    """
    rows, inferred = [], 0
    for row in read_task_rows(path):
        if lock is not None and isinstance(row.value, dict) and row.value.get("mcp_config") is None:
            row = TaskRow({**row.value, "mcp_config": gateway_config(lock)}, row.lines, row.error)
            inferred += 1
        rows.append(row)
    tasks = [resolve_files(task, path) for task in parse_tasks(rows, str(path), path.absolute().parent)]
    keys = [key for task in tasks for key in _find_plaintext_keys(task)]
    if keys:
        raise UsageError(
            "\n".join([f"{path} contains keys as plain text", *(f"  {key}" for key in keys)]),
            code="BK-ENV-TASKS",
            hint="write a variable instead, as $NAME; it is resolved when a rollout starts",
        )
    return tasks, inferred


def check_portable(tasks: Iterable[McpTask], path: Path) -> None:
    """Raise UsageError for a task that depends on something on this machine that a dataset cannot hold."""
    for task in tasks:
        if any(grader.python is not None for grader in task.graders):
            raise UsageError(
                f"{path}: task {task.id} has a Python grader, which a dataset cannot contain",
                code="BK-GRADER",
                hint="move the grader to the configuration, and values that differ by task to the metadata",
            )
        if task.files is not None and not Path(task.files).exists():
            raise UsageError(
                f"no such file or folder: {task.files}",
                code="BK-FILE-NOT-FOUND",
                at=f"{path}: task {task.id} (files)",
                hint="correct `files` of the task",
            )


def as_row(task: McpTask) -> dict[str, str | None]:
    """Return a task as columns of a dataset. Nested values are JSON texts, and a missing setup is null."""
    values = task.model_dump(exclude_defaults=True)
    columns = (*COLUMNS, *(name for name in (GRADE, FILES) if values.get(name) is not None))
    values |= {name: None for name in COLUMNS if name not in values}
    for name in ("setup_tool", "evaluate_tool"):
        if values[name] and len(values[name]) == 1:
            values[name] = values[name][0]
    for name in (*NESTED, GRADE):
        if values.get(name) is not None:
            values[name] = json.dumps(values[name], ensure_ascii=False)
    return {name: values[name] for name in columns}


def split_tasks(tasks: Sequence[McpTask], fraction: float | None) -> dict[str, list[McpTask]]:
    """Return the tasks by split.

    With `fraction`, that share of tasks is `test`. A hash of the id chooses them, so adding tasks does not
    move others. Without it, the metadata decides. Raises UsageError if both are given, and if no training
    task is left.
    """
    eval_ids = {task.id: None for task in tasks if task.metadata.get("split") in _EVAL_SPLITS}
    if fraction is not None and eval_ids:
        raise UsageError(
            f"--split is set, but the metadata of {counted(len(eval_ids), 'task')} has a split too, as of "
            f"{next(iter(eval_ids))!r}",
            code="BK-CLI-CONFLICT",
            hint="remove --split, or `split` from the metadata",
        )
    splits: dict[str, list[McpTask]] = {TRAIN: [], TEST: []}
    for task in tasks:
        held_out = task.id in eval_ids if fraction is None else _share(task.id) < fraction
        splits[TEST if held_out else TRAIN].append(task)
    if not splits[TRAIN]:
        raise UsageError(
            f"no training tasks: {counted(len(tasks), 'task')} in the split test",
            code="BK-ENV-TASKS",
            hint="add tasks, or reduce --split",
        )
    return {name: part for name, part in splits.items() if part}


def is_plaintext_key(name: str, value: str) -> bool:
    """Return True if a value with the name of a key is plain text, not a variable."""
    return bool(_SECRET.search(name) and value and not _VARIABLE.search(value))


def _share(name: str) -> float:
    """Map a name to a uniform number in [0, 1) by its hash."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64


def _find_plaintext_keys(task: McpTask) -> Iterator[str]:
    for name, server in task.mcp_config.items():
        field = "headers" if isinstance(server, HttpServer) else "env"
        values: Mapping[str, str] = server.headers if isinstance(server, HttpServer) else server.env
        for key, value in values.items():
            if is_plaintext_key(key, value):
                yield f"task {task.id}: mcp_config.{name}.{field}.{key}"
