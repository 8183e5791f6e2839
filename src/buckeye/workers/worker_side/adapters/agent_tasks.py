"""Reader for the tasks of the environment `agent`, which are files in JSON Lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .base import AdapterError, Json


def read_tasks(path: Path, *, flat: bool = False) -> list[Json]:
    """Return the tasks of a file with one object per line. Empty lines are skipped.

    All fields except `id`, `prompt` and `messages` become part of the task's data, and so do the fields of
    the object `data`, unless `flat` is set. Raises AdapterError with the line number of an invalid task.
    """
    tasks: dict[str, Json] = {}
    for number, line in enumerate(path.read_text("utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            task = make_task(json.loads(line), number, flat=flat)
        except ValueError as error:
            raise AdapterError(f"{path}:{number}: {error}") from error
        if task["id"] in tasks:
            raise AdapterError(f"{path}:{number}: duplicate id {task['id']!r}")
        tasks[task["id"]] = task
    if not tasks:
        raise AdapterError(f"{path} has no tasks")
    return list(tasks.values())


def make_task(row: Any, number: int, *, flat: bool = False) -> Json:
    """Return a parsed line as a task. Raises ValueError if it is not a task."""
    if not isinstance(row, dict):
        raise ValueError("a task must be a JSON object")
    if ("prompt" in row) == ("messages" in row):
        raise ValueError('a task must have either "prompt", a string, or "messages", a list')
    data = {"data": row["data"]} if flat and "data" in row else row.get("data", {})
    if not isinstance(data, dict):
        raise ValueError('"data" must be an object')
    extra_fields = {
        name: value for name, value in row.items() if name not in ("id", "prompt", "messages", "data")
    }
    messages = row["messages"] if "messages" in row else _as_messages(row["prompt"])
    if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise ValueError('"messages" must be a list of objects with a role')
    if not all(isinstance(message.get("content", ""), (str, list, type(None))) for message in messages):
        raise ValueError('"prompt" and every "content" must be a string')
    return {"id": str(row.get("id", number)), "messages": messages, "data": {**data, **extra_fields}}


def _as_messages(prompt: Any) -> Any:
    """Return a prompt as messages. A list is returned unchanged: datasets often have messages in `prompt`."""
    return prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
