"""Prepare tasks of a file for a dataset: add a missing `mcp_config`, check the tasks, split them."""

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
"""Columns whose values are JSON texts, or null if missing. The column `grade` is a JSON text too."""
TRAIN, TEST = "train", "test"
_EVAL_SPLITS = ("eval", "test")
_GATEWAY = "http://localhost:8765/mcp"
_SECRET = re.compile(
    r"(authorization|cookie|token|secret|password|passwd|credential|api[_-]?key|_key$|^key$)", re.I
)
_VARIABLE = re.compile(r"\$[A-Za-z_{]")


def gateway_config(lock: EnvironmentLock) -> dict[str, Any]:
    """Return an `mcp_config` that runs the image of a lock file through `buckeye gateway` on this machine.

    The variable with the key has a default, because a gateway may accept clients without a key.
    """
    headers = {"Authorization": "Bearer ${BUCKEYE_API_KEY:-none}", "Mcp-Image": lock.image_name.tagged}
    return {"buckeye": {"url": _GATEWAY, "headers": headers}}


def read_with_lock(path: Path, lock: EnvironmentLock | None) -> tuple[list[McpTask], int]:
    """Return the tasks of a file, and the number of tasks that got the `mcp_config` of the lock file.

    Raises UsageError with every problem of the tasks, including keys in plain text.
    """
    rows, inferred = [], 0
    for row in read_task_rows(path):
        if lock is not None and isinstance(row.value, dict) and row.value.get("mcp_config") is None:
            row = TaskRow({**row.value, "mcp_config": gateway_config(lock)}, row.find_lines, row.error)
            inferred += 1
        rows.append(row)
    tasks = [resolve_files(task, path) for task in parse_tasks(rows, str(path), path.absolute().parent)]
    keys = [key for task in tasks for key in _find_plaintext_keys(task)]
    if keys:
        raise UsageError(
            "\n".join([f"{path} contains keys as plain text", *(f"  {key}" for key in keys)]),
            code="BK-ENV-TASKS",
            hint="write a variable as $NAME instead; each rollout replaces $NAME by its value",
        )
    return tasks, inferred


def check_portable(tasks: Iterable[McpTask], path: Path) -> None:
    """Raise UsageError for a task that a dataset cannot contain: a Python grader, or missing files."""
    for task in tasks:
        if any(grader.python is not None for grader in task.grade):
            raise UsageError(
                f"{path}: task {task.id} has a Python grader, which a dataset cannot contain",
                code="BK-GRADER",
                hint="move the grader to the configuration, and its values for each task to the metadata",
            )
        if task.files is not None and not Path(task.files).exists():
            raise UsageError(
                f"no such file or folder: {task.files}",
                code="BK-FILE-NOT-FOUND",
                at=f"{path}: task {task.id} (files)",
                hint="correct `files` of the task",
            )


def as_row(task: McpTask) -> dict[str, str | None]:
    """Return a task as the columns of a dataset's row. Objects and lists are JSON texts."""
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
    """Return the tasks by split `train` and `test`.

    With `fraction`, about this share of the tasks is `test`. A hash of its id assigns a task, so new tasks do
    not move other tasks. Without `fraction`, `split` in the metadata decides. Raises UsageError if both are
    given, or if the split `train` would be empty.
    """
    eval_ids = {task.id: None for task in tasks if task.metadata.get("split") in _EVAL_SPLITS}
    if fraction is not None and eval_ids:
        raise UsageError(
            f"--split is set, but the metadata of {counted(len(eval_ids), 'task')} sets a split too, such as "
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
    """Return True if `name` is the name of a key or password, and `value` is plain text, not a variable."""
    return bool(_SECRET.search(name) and value and not _VARIABLE.search(value))


def _share(name: str) -> float:
    """Return a number in [0, 1) from the hash of a name. The numbers of many names are uniform."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64


def _find_plaintext_keys(task: McpTask) -> Iterator[str]:
    for name, server in task.mcp_config.items():
        field = "headers" if isinstance(server, HttpServer) else "env"
        values: Mapping[str, str] = server.headers if isinstance(server, HttpServer) else server.env
        for key, value in values.items():
            if is_plaintext_key(key, value):
                yield f"task {task.id}: mcp_config.{name}.{field}.{key}"
