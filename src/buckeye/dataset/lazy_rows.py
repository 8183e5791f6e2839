"""Rows of large files. A row is decoded when it is read, so that a million rows need little memory."""

from __future__ import annotations

import os
from abc import abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, time
from decimal import Decimal
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, overload

import msgspec

from buckeye.errors import UsageError

_decode = msgspec.json.Decoder().decode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_INVALID = (msgspec.MsgspecError, ValueError, RecursionError)
_BLOCK_BYTES = 2**20
_KEPT_BYTES = 2**26
"""Size of the largest file whose text stays in memory, so that a user may edit it during a run."""
_BATCH = 1024
"""Number of rows of a Parquet table that are converted at once."""


class Row(NamedTuple):
    """Row of a dataset: its values by column, and its location, such as `prompts.jsonl:3`."""

    values: Mapping[str, Any]
    at: str


def make_row(values: Mapping[str, Any], at: str) -> Row:
    """Return a row in which NaN, the missing value of pandas, is None."""
    missing = [name for name, value in values.items() if isinstance(value, float) and value != value]
    return Row({**values, **dict.fromkeys(missing)} if missing else values, at)


class LazyRows(Sequence[Row]):
    """Sequence of rows. Each access decodes a row again."""

    names: Sequence[str]
    """Columns of all rows, in the order in which they appear."""
    has_valid_text: bool = True
    """True if no text has half a surrogate pair, because the decoder refuses it."""

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        numbers = range(len(self))[index]
        return self._row(numbers) if isinstance(numbers, int) else [self._row(number) for number in numbers]

    @abstractmethod
    def _row(self, index: int) -> Row:
        """Return the row `index`, from 0."""


class JsonRows(LazyRows):
    """Rows of a JSON Lines file, or of a JSON file with a list. A large file is not kept in memory.

    A large file must not change while it is used.
    """

    def __init__(self, path: Path, places: _Places) -> None:
        self.names = tuple(places.names)
        self._path = path
        self._places = places
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._state = self._read_state()
        size = self._state[0]
        self._text = os.pread(self._file, size, 0) if size <= _KEPT_BYTES else None

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)

    def __len__(self) -> int:
        return len(self._places.starts)

    def __iter__(self) -> Iterator[Row]:
        block, block_start, path = b"", 0, str(self._path)
        for start, length, line in self._places:
            if start + length > block_start + len(block):
                block, block_start = self._read(start, max(length, _BLOCK_BYTES)), start
            at = start - block_start
            yield Row(_decode(block[at : at + length]), f"{path}:{line}")

    def _row(self, index: int) -> Row:
        places = self._places
        text = self._read(places.starts[index], places.lengths[index])
        return Row(_decode(text), f"{self._path}:{places.lines[index]}")

    def _read(self, start: int, length: int) -> bytes:
        if self._text is not None:
            return self._text[start : start + length]
        if self._read_state() != self._state:
            hint = "do not change the files of a dataset while they are used; start again"
            raise UsageError(f"{self._path} has changed", code="BK-DATA-FORMAT", hint=hint)
        return os.pread(self._file, length, start)

    def _read_state(self) -> tuple[int, int]:
        state = os.fstat(self._file)
        return state.st_size, state.st_mtime_ns


@dataclass(slots=True)
class _Places:
    """Places of rows in a file: first byte, number of bytes, and line; and the names of the columns."""

    starts: array[int] = field(default_factory=lambda: array("Q"))
    lengths: array[int] = field(default_factory=lambda: array("I"))
    lines: array[int] = field(default_factory=lambda: array("I"))
    names: dict[str, None] = field(default_factory=dict)
    _known: set[tuple[str, ...]] = field(default_factory=set)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        return zip(self.starts, self.lengths, self.lines, strict=True)

    def add(self, text: bytes | msgspec.Raw, start: int, length: int, line: int) -> None:
        """Add a row. Raises one of `_INVALID` if its text is not a JSON object."""
        value = _decode(text)
        if type(value) is not dict:
            raise ValueError("not an object")
        self.starts.append(start)
        self.lengths.append(length)
        self.lines.append(line)
        columns = tuple(value)
        if columns not in self._known:
            self._known.add(columns)
            self.names.update(dict.fromkeys(columns))


def json_lines_rows(path: Path) -> JsonRows | None:
    """Return the rows of a JSON Lines file, or None unless every line is blank, or a JSON object in UTF-8."""
    places, start = _Places(), 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.isspace():
                    places.add(line, start, len(line), number)
                start += len(line)
    except (OSError, *_INVALID):
        return None
    return JsonRows(path, places) if places.starts else None


def json_list_rows(path: Path) -> JsonRows | None:
    """Return the rows of a JSON file, or None unless it is a list of JSON objects in UTF-8."""
    places, end, line = _Places(), 0, 1
    try:
        text = path.read_bytes()
        for item in _decode_list(text):
            start = text.index(memoryview(item), end)  # only white space and a comma are before it
            line += text.count(b"\n", end, start)
            end = start + len(memoryview(item))
            places.add(item, start, end - start, line)
            line += text.count(b"\n", start, end)
    except (OSError, *_INVALID):
        return None
    return JsonRows(path, places) if places.starts else None


class ParquetRows(LazyRows):
    """Rows of a Parquet table in memory."""

    def __init__(self, path: Path, table: Any) -> None:
        self.names = tuple(table.column_names)
        self._path = path
        self._table = table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __iter__(self) -> Iterator[Row]:
        for start in range(0, len(self), _BATCH):
            yield from self._converted(start, _BATCH)

    def _row(self, index: int) -> Row:
        return self._converted(index, 1)[0]

    def _converted(self, start: int, count: int) -> list[Row]:
        path = str(self._path)
        return [
            make_row(
                {name: value if type(value) is str else _plain(value) for name, value in values.items()},
                f"{path}: row {number}",
            )
            for number, values in enumerate(self._table.slice(start, count).to_pylist(), start + 1)
        ]


def _plain(value: Any) -> Any:
    """Convert a value of a Parquet table to a value that JSON can represent."""
    if isinstance(value, dict):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return float(value)
    return value if value is None or isinstance(value, str | int | float) else str(value)


class JoinedRows(LazyRows):
    """Rows of several files, one after another."""

    def __init__(self, parts: Sequence[Sequence[Row]]) -> None:
        self.names = tuple(dict.fromkeys(name for part in parts for name in column_names(part)))
        self.has_valid_text = all(isinstance(part, LazyRows) and part.has_valid_text for part in parts)
        self._parts = parts
        self._ends = list(accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __iter__(self) -> Iterator[Row]:
        for part in self._parts:
            yield from part

    def _row(self, index: int) -> Row:
        number = bisect_right(self._ends, index)
        return self._parts[number][index - (self._ends[number] - len(self._parts[number]))]


def column_names(rows: Iterable[Row]) -> Sequence[str]:
    """Return the columns of all rows, in the order in which they appear."""
    if isinstance(rows, LazyRows):
        return rows.names
    return list(dict.fromkeys(name for row in rows for name in row.values))
