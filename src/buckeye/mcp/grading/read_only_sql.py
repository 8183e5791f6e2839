"""Read-only queries with a time limit, on databases from untrusted sources."""

from __future__ import annotations

import re
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

_MOST_ROWS = 1_000
_LONGEST_VALUE = 16 * 2**20
_SECONDS = 5.0
_READING = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
_QUERY = re.compile(r"\s*(select|with|values)\b", re.I)
_DEPENDS = ("no such table", "no such column", "no such function", "bindings")


def run_query(path: Path, query: str, parameters: list[Any]) -> list[list[Any]]:
    """Return the rows of a query on a database file that no other process uses.

    Bytes become hexadecimal text. Raises sqlite3.Error, also for a query that would write, and ValueError for
    too many rows or too much time.
    """
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        _restrict(database)
        deadline = time.monotonic() + _SECONDS
        database.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
        try:
            found = database.execute(query, parameters).fetchmany(_MOST_ROWS + 1)
        except sqlite3.OperationalError as error:
            if "interrupted" in str(error):
                raise ValueError(f"it took longer than {_SECONDS:g} s") from None
            raise
    if len(found) > _MOST_ROWS:
        raise ValueError(f"it gives more than {_MOST_ROWS} rows")
    return [[item.hex() if isinstance(item, bytes) else item for item in row] for row in found]


def query_problem(query: str) -> str | None:
    """Return the problem of a query that holds for any database, or None."""
    if not _QUERY.match(query):
        return "it begins with SELECT, WITH or VALUES"
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as database:
        _restrict(database)
        try:
            database.execute(f"EXPLAIN {query}")  # compiles the query without running it
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
            said = str(error)
            return None if any(word in said for word in _DEPENDS) else said
    return None


def _restrict(database: sqlite3.Connection) -> None:
    """Restrict a connection to reading this file, even if its schema is malicious."""
    for setting in ("query_only = on", "trusted_schema = off", "cell_size_check = on", "mmap_size = 0"):
        database.execute(f"pragma {setting}")
    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE)
    database.set_authorizer(_allowed)


def _allowed(action: int, _first: str | None, second: str | None, *_: str | None) -> int:
    loads_code = action == sqlite3.SQLITE_FUNCTION and second == "load_extension"
    return sqlite3.SQLITE_OK if action in _READING and not loads_code else sqlite3.SQLITE_DENY
