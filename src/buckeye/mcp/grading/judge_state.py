"""Verdicts on files in a rollout's folder. Their content is untrusted."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path, PurePosixPath

from buckeye.mcp.grading.judge import GraderVerdict, judge_text
from buckeye.mcp.grading.schema import StateGrader

_MAX_TEXT_BYTES = 16 * 2**20
_WORKDIR = "{workdir}/"


class StateFileError(Exception):
    """The requested file does not exist or is unusable. The message is the reason."""


def judge_state(grader: StateGrader, folder: Path) -> GraderVerdict:
    """Return the verdict on a file in a rollout's folder."""
    assert grader.file is not None
    try:
        return _judge_file(grader, folder, grader.file.removeprefix(_WORKDIR))
    except StateFileError as error:
        return GraderVerdict(0.0, str(error))


def _judge_file(grader: StateGrader, folder: Path, name: str) -> GraderVerdict:
    if not grader.exists:
        exists = os.path.lexists(folder / name)
        return GraderVerdict(
            float(not exists), f"{name} {'exists' if exists else 'does not exist, as expected'}"
        )
    if not grader.tests and grader.json_path is None:
        if not (folder / name).is_dir() or (folder / name).is_symlink():
            with _open_file(folder, name):
                pass
        return GraderVerdict(1.0, f"{name} exists")
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

    Symbolic links are never followed, and a named pipe does not block. Raises StateFileError.
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
            return f"{name} is behind a symbolic link, which is not followed"
    return f"no such file: {name}" if isinstance(error, FileNotFoundError) else f"{name}: {error.strerror}"
