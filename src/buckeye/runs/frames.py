"""What is in a run as Arrow data, read piece by piece when somebody takes it. pandas, polars, duckdb and
pyarrow take a frame as it is (the Arrow PyCapsule protocol). Needs pyarrow."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from buckeye.base.distribution import need
from buckeye.errors import UsageError

if TYPE_CHECKING:
    import pyarrow

SCHEMA_VERSION = 1
"""Rises when a column goes or changes its meaning; a new column is no change."""

_ROWS = 16_384
_OF_ROLLOUTS = {
    "split": ("string", "split"),
    "step": ("int32", "step"),
    "group": ("int64", "grp"),
    "env": ("string", "env"),
    "task": ("string", "task"),
    "dropped": ("string", "dropped"),
}
_GROUPS = {
    **_OF_ROLLOUTS,
    "prompt": ("int64", "max(prompt)"),
    "rollouts": ("int32", "count(*)"),
    "scored": ("int32", "count(reward)"),
    "reward_mean": ("float64", "avg(reward)"),
    "reward_min": ("float64", "min(reward)"),
    "reward_max": ("float64", "max(reward)"),
    "truncated": ("int32", "sum(truncated)"),
    "distinct_texts": ("int32", "count(DISTINCT text)"),
    "completion_tokens": ("int64", "sum(completion_tokens)"),
    "seconds": ("float64", "max(seconds)"),
    "oldest_version": ("int32", "min(oldest_version)"),
}
_ROLLOUTS = {
    **_OF_ROLLOUTS,
    "number": ("int32", "number"),
    "reward": ("float64", "reward"),
    "shaped_reward": ("float64", "shaped_reward"),
    "advantage": ("float64", "advantage"),
    "components": ("string", "components"),
    "stop_reason": ("string", "stop_reason"),
    "error": ("string", "error"),
    "truncated": ("bool", "truncated"),
    "cut": ("bool", "cut"),
    "retried": ("bool", "retried"),
    "seconds": ("float64", "seconds"),
    "sampling_seconds": ("float64", "sampling_seconds"),
    "turns": ("int32", "turns"),
    "segments": ("int32", "segments"),
    "completion_tokens": ("int32", "completion_tokens"),
    "oldest_version": ("int32", "oldest_version"),
    "prompt": ("int64", "prompt"),
    "text": ("int64", "text"),
}
COLUMNS: Mapping[str, Mapping[str, str]] = {
    "metrics": {
        "step": "int32",
        "process": "string",
        "attempt": "int32",
        "time": "float64",
        "name": "string",
        "value": "float64",
    },
    "events": {"time": "float64", "attempt": "int32", "event": "string", "details": "string"},
    "groups": {name: kind for name, (kind, _) in _GROUPS.items()},
    "rollouts": {name: kind for name, (kind, _) in _ROLLOUTS.items()},
    "samples": {
        "step": "int32",
        "sample": "int32",
        "group": "int64",
        "number": "int32",
        "segment": "int32",
        "truncated": "bool",
        "tokens": "int32",
        "sampled_tokens": "int32",
        "trained_tokens": "int32",
        "advantage": "float32",
        "temperature": "float64",
    },
    "tokens": {
        "step": "int32",
        "sample": "int32",
        "position": "int32",
        "token_id": "int32",
        "trained": "bool",
        "reason": "string",
        "sampler_logprob": "float32",
        "trainer_logprob": "float32",
        "advantage": "float32",
        "version": "int32",
        "turn": "int32",
    },
}
"""The columns of each frame with their Arrow types."""

Columns = Mapping[str, Any]
"""Column -> values; of an array with nulls the values, and a bool array that is True where there is none."""


@dataclass(frozen=True)
class Frame:
    """Rows of one kind. It holds none of them: each way to take them reads anew."""

    name: str
    columns: tuple[str, ...]
    _pieces: Callable[[range | None, tuple[str, ...]], Iterator[Columns]]
    _steps: range | None = None

    def select(self, *columns: str) -> Frame:
        """The same with these columns alone. Raises UsageError for one that there is not."""
        for column in columns:
            if column not in COLUMNS[self.name]:
                raise UsageError(f"{self.name} has no column {column}, but {', '.join(COLUMNS[self.name])}")
        return replace(self, columns=columns)

    def of_steps(self, first: int, last: int | None = None) -> Frame:
        """The same of one step alone, or from the first to the last. Events have no step."""
        return replace(self, _steps=range(first, (first if last is None else last) + 1))

    @property
    def schema(self) -> pyarrow.Schema:
        """Names, types, and in the metadata `buckeye.frame` and `buckeye.schema`, the version of these."""
        need("pyarrow", "Runs as Arrow data")
        import pyarrow as pa

        kinds = COLUMNS[self.name]
        fields = [pa.field(column, pa.type_for_alias(kinds[column])) for column in self.columns]
        return pa.schema(fields, {"buckeye.frame": self.name, "buckeye.schema": str(SCHEMA_VERSION)})

    def batches(self) -> Iterator[pyarrow.RecordBatch]:
        """The rows, so many at a time that memory stays bounded."""
        schema = self.schema
        import pyarrow as pa

        for piece in self._pieces(self._steps, self.columns):
            arrays = [_array(pa, piece[field.name], field.type) for field in schema]
            whole = pa.record_batch(arrays, schema=schema)
            for start in range(0, whole.num_rows, _ROWS):
                yield whole.slice(start, _ROWS)

    def reader(self) -> pyarrow.RecordBatchReader:
        """The rows as a stream of Arrow's."""
        schema = self.schema
        import pyarrow as pa

        return pa.RecordBatchReader.from_batches(schema, self.batches())

    def table(self) -> pyarrow.Table:
        """All rows, in memory."""
        return self.reader().read_all()

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        return self.reader().__arrow_c_stream__(requested_schema)


def frame(name: str, pieces: Callable[[range | None], Iterator[Columns]]) -> Frame:
    """A frame of what `pieces` reads of some steps, None for all."""
    return Frame(name, tuple(COLUMNS[name]), lambda steps, _: pieces(steps))


def index_frame(name: str, index: Callable[[], sqlite3.Connection]) -> Frame:
    """A frame of what the index has."""
    return Frame(name, tuple(COLUMNS[name]), lambda steps, columns: _asked(index(), name, steps, columns))


def _asked(
    index: sqlite3.Connection, name: str, steps: range | None, columns: tuple[str, ...]
) -> Iterator[Columns]:
    """The rows of the index, some thousand at a time."""
    known = _GROUPS if name == "groups" else _ROLLOUTS
    chosen = ", ".join(known[column][1] for column in columns)
    group = " AND retried = 0 GROUP BY split, step, env, grp, dropped" if name == "groups" else ""
    order = "split DESC, step, env, grp" + ("" if name == "groups" else ", number, at")
    first, last = (steps.start, steps.stop - 1) if steps is not None else (0, 2**62)
    cursor = index.execute(
        f"SELECT {chosen} FROM rollouts WHERE step BETWEEN ? AND ?{group} ORDER BY {order}",  # noqa: S608  our own names
        (first, last),
    )
    while rows := cursor.fetchmany(_ROWS):
        yield dict(zip(columns, zip(*rows, strict=True), strict=True))


def _array(pa: Any, values: Any, kind: Any) -> pyarrow.Array:
    if isinstance(values, tuple) and len(values) == 2 and hasattr(values[0], "dtype"):
        return cast("pyarrow.Array", pa.array(values[0], mask=values[1]).cast(kind))
    if kind == pa.bool_() and not hasattr(values, "dtype"):
        values = [None if value is None else bool(value) for value in values]
    return cast("pyarrow.Array", pa.array(values, type=kind))
