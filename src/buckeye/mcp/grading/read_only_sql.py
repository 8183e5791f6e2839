"""Run read-only queries with a time limit on untrusted SQLite databases."""

from __future__ import annotations

import re
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

_MAX_ROWS = 1_000
_MAX_VALUE_BYTES = 16 * 2**20
_SECONDS = 5.0
_READ_ACTIONS = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
}
_QUERY = re.compile(r"\s*(select|with|values)\b", re.I)
_DATABASE_ERRORS = ("no such table", "no such column", "no such function", "bindings")


def run_query(path: Path, query: str, parameters: list[Any]) -> list[list[Any]]:
    """Return the rows of a query on a database file that no other process uses.

    Bytes become hexadecimal text. Raises sqlite3.Error for an invalid query or a query that writes, and
    ValueError for too many rows or a timeout.
    """
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        _restrict(database)
        deadline = time.monotonic() + _SECONDS
        database.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
        try:
            rows = database.execute(query, parameters).fetchmany(_MAX_ROWS + 1)
        except sqlite3.OperationalError as error:
            if "interrupted" in str(error):
                raise ValueError(f"timeout after {_SECONDS:g} s") from None
            raise
    if len(rows) > _MAX_ROWS:
        raise ValueError(f"more than {_MAX_ROWS} rows")
    return [[item.hex() if isinstance(item, bytes) else item for item in row] for row in rows]


def query_problem(query: str) -> str | None:
    """Return a problem of a query that exists for every database, such as a syntax error, or None."""
    if not _QUERY.match(query):
        return "must begin with SELECT, WITH or VALUES"
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as database:
        _restrict(database)
        try:
            database.execute(f"EXPLAIN {query}")  # compiles the query without running it
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
            message = str(error)
            return None if any(text in message for text in _DATABASE_ERRORS) else message
    return None


def _restrict(database: sqlite3.Connection) -> None:
    """Allow only reads of this database file, even if the file's schema is malicious."""
    for setting in ("query_only = on", "trusted_schema = off", "cell_size_check = on", "mmap_size = 0"):
        database.execute(f"pragma {setting}")
    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
    database.set_authorizer(_authorize)


def _authorize(action: int, _first: str | None, second: str | None, *_: str | None) -> int:
    loads_code = action == sqlite3.SQLITE_FUNCTION and second == "load_extension"
    return sqlite3.SQLITE_OK if action in _READ_ACTIONS and not loads_code else sqlite3.SQLITE_DENY
