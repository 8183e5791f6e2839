"""Judge files and databases in a rollout's folder. The model may have written them, so they are untrusted."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sqlite3
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path, PurePosixPath

from buckeye.base.columns import counted
from buckeye.mcp.grading.judge import GraderVerdict, format_short, json_equal, judge_text
from buckeye.mcp.grading.read_only_sql import run_query
from buckeye.mcp.grading.schema import StateGrader

_MAX_TEXT_BYTES = 16 * 2**20
_MAX_DATABASE_BYTES = 2**30
_WORKDIR = "{workdir}/"
_UNFIT_QUERY = ("no such column", "no such function")


class StateFileError(Exception):
    """The file of a grader does not exist or is unusable. The message is the reason."""


def judge_state(grader: StateGrader, folder: Path) -> GraderVerdict:
    """Return the verdict on a file or a database in a rollout's folder.

    Raises sqlite3.Error for a query that does not fit the database, for example with an unknown column.
    """
    try:
        if grader.file is not None:
            return _judge_file(grader, folder, grader.file.removeprefix(_WORKDIR))
        assert grader.database is not None
        return _judge_database(grader, folder, grader.database.removeprefix(_WORKDIR))
    except StateFileError as error:
        return GraderVerdict(0.0, str(error))


def _judge_file(grader: StateGrader, folder: Path, name: str) -> GraderVerdict:
    if not grader.exists:
        exists = os.path.lexists(folder / name)
        return GraderVerdict(
            float(not exists), f"{name} {'exists' if exists else 'does not exist, as expected'}"
        )
    if grader.sha256 is None and not grader.tests and grader.json_path is None:
        if not (folder / name).is_dir() or (folder / name).is_symlink():
            with _open_file(folder, name):
                pass
        return GraderVerdict(1.0, f"{name} exists")
    if grader.sha256 is not None:
        with _open_file(folder, name) as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != grader.sha256:
            return GraderVerdict(
                0.0, f"expected {name} with the hash {grader.sha256[:12]}…, found {found[:12]}…"
            )
        if not grader.tests and grader.json_path is None:
            return GraderVerdict(1.0, f"{name} has the hash {found[:12]}…")
    with _open_file(folder, name) as file:
        content = file.read(_MAX_TEXT_BYTES + 1)
    if len(content) > _MAX_TEXT_BYTES:
        raise StateFileError(f"{name} is larger than {_MAX_TEXT_BYTES // 2**20} MiB")
    try:
        return judge_text(grader, content.decode("utf-8"))
    except UnicodeDecodeError:
        raise StateFileError(f"{name} is not UTF-8 text") from None


@contextmanager
def _open_file(folder: Path, name: str) -> Iterator[BufferedReader]:
    """Open a regular file in the folder for reading.

    Never follow symbolic links, and never block on a named pipe. Raises StateFileError.
    """
    *parents, last = [part for part in PurePosixPath(name).parts if part != "."] or [""]
    opened: list[int] = []
    try:
        parent = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        opened.append(parent)
        for part in parents:
            if part in ("..", "/"):
                raise StateFileError(f"{name} is not in the rollout's folder")
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            parent = os.open(part, flags, dir_fd=parent)
            opened.append(parent)
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        descriptor = os.open(last, flags, dir_fd=parent)
    except OSError as error:
        raise StateFileError(_explain(folder, name, error)) from None
    finally:
        for directory in opened:
            os.close(directory)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise StateFileError(f"{name} is not a regular file")
        yield file


def _explain(folder: Path, name: str, error: OSError) -> str:
    path = folder
    for part in PurePosixPath(name).parts:
        path = path / part
        if path.is_symlink():
            return f"{name} is behind a symbolic link, and graders do not follow links"
    return f"no such file: {name}" if isinstance(error, FileNotFoundError) else f"{name}: {error.strerror}"


def _judge_database(grader: StateGrader, folder: Path, name: str) -> GraderVerdict:
    assert grader.query is not None
    with tempfile.TemporaryDirectory(prefix="buckeye-grade-") as temporary:
        copy = Path(temporary, "database")
        _copy(folder, name, copy)
        if os.path.lexists(folder / f"{name}-wal"):
            _copy(folder, f"{name}-wal", Path(f"{copy}-wal"))
        try:
            rows = run_query(copy, grader.query, grader.parameters)
        except (sqlite3.Error, ValueError, OverflowError) as error:
            if str(error).startswith(_UNFIT_QUERY):  # no verdict: the query may be wrong for every rollout
                raise
            raise StateFileError(f"{name}: the query failed: {error}") from None
    if grader.rows is None:
        value = rows[0][0] if len(rows) == 1 and len(rows[0]) == 1 else rows
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return judge_text(grader, text, None if value is None or isinstance(value, str) else value)
    expected = grader.rows
    if len(rows) != len(expected):
        return GraderVerdict(
            0.0, f"expected {counted(len(expected), 'row')}, found {counted(len(rows), 'row')}"
        )
    for number, (wanted, row) in enumerate(zip(expected, rows, strict=True), 1):
        if not json_equal(wanted, row):
            return GraderVerdict(
                0.0, f"row {number}: expected {format_short(wanted)}, found {format_short(row)}"
            )
    return GraderVerdict(1.0, f"found the expected {counted(len(rows), 'row')}")


def _copy(folder: Path, name: str, to: Path) -> None:
    with _open_file(folder, name) as file, to.open("wb") as target:
        if os.fstat(file.fileno()).st_size > _MAX_DATABASE_BYTES:
            raise StateFileError(f"{name} is larger than {_MAX_DATABASE_BYTES // 2**20} MiB")
        shutil.copyfileobj(file, target)
