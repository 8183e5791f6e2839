"""Tasks of a dataset: one task per row, whose prompt the policy replies to once."""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import compress
from json.encoder import encode_basestring
from typing import Any, Literal, overload

from buckeye.config.problems import closest, suggestion
from buckeye.dataset.lazy_rows import LazyRows, Row
from buckeye.dataset.rows import raise_problems, row_error
from buckeye.envs.base import Message, Task, find_non_text_part
from buckeye.errors import UsageError

Kind = Literal["tasks", "prompts", "chats"]

_ROLES = ("system", "developer", "user", "assistant", "tool")
_SHARE = 10
"""Inverse of the share of rows that are held out."""
_ENCODED_MESSAGES = '[{"'
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Kind of a dataset, and the names of its columns. `answer` is None if no column has answers."""

    kind: Kind
    prompt: str
    answer: str | None
    others: tuple[str, ...]
    """Columns that a reward function receives."""


class PromptTasks(Sequence[Task]):
    """Tasks of rows. Each access makes a task again, so that a million tasks need little memory."""

    def __init__(self, rows: Sequence[Row], columns: Columns, source: str, prefix: str = "") -> None:
        """Raises UsageError with every row that has no usable prompt."""
        self._rows = rows
        self._columns = columns
        self._prefix = prefix
        self._functions: tuple[Callable[[Task], Task], ...] = ()
        self._hashes, self._sizes = array("Q"), array("I")
        problems: list[UsageError] = []
        has_valid_text = isinstance(rows, LazyRows) and rows.has_valid_text
        is_plain = has_valid_text and columns.kind == "prompts"
        for number, row in enumerate(rows):
            try:
                text = _plain_prompt_text(row.values.get(columns.prompt)) if is_plain else b""
                if not text:
                    task = self._make(number, row)
                    if not (has_valid_text and task.data["is_text"]):  # refused by their decoder
                        _check_characters(task, row.at)
                    text = _prompt_text(task.messages)
            except UsageError as error:
                error.at = row.at
                problems.append(error)
            else:
                self._hashes.append(_hash(text))
                self._sizes.append(len(text))
        raise_problems(problems, source)
        self._chosen = bytearray(b"\1" * len(rows))
        self._numbers = array("I", range(len(rows)))

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | Sequence[Task]:
        if isinstance(index, slice):
            return [self._make(number, self._rows[number]) for number in self._numbers[index]]
        number = self._numbers[index]
        return self._make(number, self._rows[number])

    def __iter__(self) -> Iterator[Task]:
        for number, row in compress(enumerate(self._rows), self._chosen):
            yield self._make(number, row)

    def _make(self, number: int, row: Row) -> Task:
        task = _make_task(row, self._columns, f"{self._prefix}{number + 1}")
        for function in self._functions:
            task = function(task)
        return task

    def rows(self) -> Iterator[tuple[Mapping[str, Any], str]]:
        """Yield the data of the row of each task, and its location. This is faster than to make the tasks."""
        if self._columns.kind == "prompts":
            yield from compress(self._rows, self._chosen)
        else:
            yield from ((task.data["row"], task.data["at"]) for task in self)

    def map(self, function: Callable[[Task], Task]) -> PromptTasks:
        """Return the tasks that `function` returns."""
        tasks = copy(self)
        tasks._functions = (*self._functions, function)
        return tasks

    def hold_out(self) -> tuple[PromptTasks, PromptTasks]:
        """Return the tasks to train on, and a tenth to evaluate on. Tasks with equal prompts stay together.

        The choice depends on the prompt alone, so that every run holds out the same tasks. If a tenth is less
        than one task, the task with the smallest hash is held out. A single task is never held out.
        """
        hashes = self._hashes
        chosen = {value for value in hashes if value % _SHARE == 0}
        least = min(hashes, default=0)
        if not chosen and any(value != least for value in hashes):
            chosen = {least}
        if chosen and all(value in chosen for value in hashes):
            chosen.discard(max(chosen))
        held_out = bytearray(value in chosen for value in hashes)
        return self._choose(bytearray(not value for value in held_out)), self._choose(held_out)

    def _choose(self, chosen: bytearray) -> PromptTasks:
        tasks = copy(self)
        tasks._chosen = chosen
        tasks._numbers = array("I", compress(range(len(chosen)), chosen))
        return tasks

    def extremes(self, count: int) -> list[Task]:
        """Return the shortest task, and the `count` longest ones, measured in bytes of the prompts."""
        numbers = sorted(range(len(self)), key=lambda index: self._sizes[self._numbers[index]])
        return [self[index] for index in dict.fromkeys([numbers[0], *numbers[-count:]])]


def _make_task(row: Row, columns: Columns, task_id: str) -> Task:
    prompt = row.values.get(columns.prompt)
    data: dict[str, Any] = {name: row.values.get(name) for name in columns.others}
    prompt = _decoded(prompt)
    messages = _messages(prompt, columns.prompt, has_column=columns.prompt in row.values)
    if columns.kind == "chats":
        if len(messages) < 2 or messages[-1].get("role") != "assistant":
            raise row_error(
                "the chat does not end with a reply of the assistant, as the first chat does", row.at
            )
        *messages, reply = messages
        if columns.answer is not None and data.get(columns.answer) is None:
            data[columns.answer] = reply["content"]
    if messages[-1].get("role") == "assistant":
        raise row_error(
            f"{columns.prompt} ends with a message of the assistant", row.at, "end with a user message"
        )
    data = {"row": data, "is_text": isinstance(prompt, str), "at": row.at}
    return Task(id=task_id, messages=tuple(messages), data=data)


def _check_characters(task: Task, at: str) -> None:
    text = json.dumps([task.messages, task.data["row"]], ensure_ascii=False, default=str)
    if _LONE_SURROGATE.search(text):
        raise row_error("half of a surrogate pair, as in a truncated emoji", at, "repair the text")


def _decoded(value: Any) -> Any:
    """Return the messages that a JSON text contains, as in CSV files; return other values unchanged."""
    if isinstance(value, str) and value.lstrip().startswith(_ENCODED_MESSAGES):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _messages(prompt: Any, column: str, *, has_column: bool) -> list[Message]:
    if prompt is None or (isinstance(prompt, str) and not prompt.strip()):
        problem = "has no value" if prompt is None else "is empty"
        missing = f"{column} {problem}" if has_column else f"no column {column!r}"
        raise row_error(missing, "", "write a prompt, or remove the row")
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        shown = json.dumps(prompt, ensure_ascii=False, default=str)[:80]
        raise row_error(f"{column} is {shown}, neither text nor a list of messages", "")
    return [_message(message, number) for number, message in enumerate(prompt, 1)]


def _message(message: Any, number: int) -> Message:
    expected = 'write {"role": "user", "content": "..."}'
    if not isinstance(message, Mapping) or "role" not in message:
        what = (
            "has no role" if isinstance(message, Mapping) else f"is {json.dumps(message, default=str)[:60]}"
        )
        raise row_error(f"message {number} {what}", "", expected)
    role, content = message["role"], message.get("content")
    if role not in _ROLES:
        hint = suggestion(closest(str(role), _ROLES)) or f"use one of {', '.join(_ROLES)}"
        raise row_error(f"message {number} has the role {role!r}", "", hint)
    if isinstance(content, list):
        if (part := find_non_text_part(content)) is not None:
            raise row_error(f"message {number}: part {part[0]} is {part[1]}; only text is supported", "")
    elif not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        shown = "no content" if content is None else f"the content {json.dumps(content, default=str)[:60]}"
        raise row_error(f"message {number} has {shown}", "", expected)
    return {name: value for name, value in message.items() if value is not None}


def prompt_hash(task: Task) -> int:
    """Return a hash of the prompt of a task."""
    return _hash(_prompt_text(task.messages))


def _prompt_text(messages: Sequence[Message]) -> bytes:
    """Return messages as JSON text in UTF-8."""
    if len(messages) == 1 and messages[0].keys() == {"role", "content"} and messages[0]["role"] == "user":
        content = messages[0]["content"]
        if plain := _plain_prompt_text(content):  # the same text, much faster
            return plain
    return json.dumps(messages, sort_keys=True, ensure_ascii=False).encode()


def _plain_prompt_text(prompt: Any) -> bytes:
    """Return the prompt of a row as `_prompt_text` does, or b"" unless it is plain text."""
    if type(prompt) is not str or not (start := prompt.lstrip()[:3]) or start == _ENCODED_MESSAGES:
        return b""
    return b'[{"content": %b, "role": "user"}]' % encode_basestring(prompt).encode()


def _hash(text: bytes) -> int:
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big")
