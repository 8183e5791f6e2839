"""Read files that third parties may have placed, only after a check of their type and size.

This module imports only the standard library, because workers of vLLM load it in a separate environment.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

MAX_TEXT_BYTES = 256 * 2**20
"""Maximum size of a file to read: ten times the size of the largest tokenizers and indexes."""


class NotRegularFileError(ValueError):
    """The path is a pipe, device, folder or link instead of a regular file, or the file is too large."""


def read_regular(path: Path, *, limit: int = MAX_TEXT_BYTES) -> bytes:
    """Return the content of a regular file of at most `limit` bytes. The call does not block on a pipe.

    Raise `OSError` if the path cannot be opened, and `NotRegularFileError` if it is not a regular file or
    has more than `limit` bytes.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise NotRegularFileError(f"{path} is {_kind(status.st_mode)}, not a file")
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(limit + 1) if status.st_size <= limit else b""
    finally:
        os.close(descriptor)
    if status.st_size > limit or len(content) > limit:
        raise NotRegularFileError(f"{path} has more than {limit:,} bytes")
    return content


def data_folder(path: Path, root: Path) -> Path:
    """Check that the folder `path` contains only files and folders. Return its path with links resolved.

    Raise `OSError` if the folder cannot be read, and `NotRegularFileError` if it is not below `root` or
    contains other entries.
    """
    real, allowed = path.resolve(), root.resolve()
    if not real.is_relative_to(allowed):
        raise NotRegularFileError(f"{path} is not in {allowed}, the only folder to load weights from")
    with os.scandir(real) as entries:
        for entry in entries:
            mode = entry.stat(follow_symlinks=False).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise NotRegularFileError(f"{entry.path} is {_kind(mode)}, not a file")
    return real


def list_regular_files(folder: Path) -> Iterator[Path]:
    """Yield the files under the folder of a model, sorted.

    A link counts as a file if its target is in the folder, or in `blobs` of the Hugging Face cache. Raise
    `NotRegularFileError` for a link with another target, because a copy of the model would contain that file.
    """
    top = folder.resolve()
    blobs = top.parent.parent / "blobs" if top.parent.name == "snapshots" else top
    for path in sorted(folder.rglob("*")):
        real = path.resolve()
        if path.is_symlink() and not (real.is_relative_to(top) or real.is_relative_to(blobs)):
            raise NotRegularFileError(f"{path} is a link to {real}, outside of the model's folder")
        if path.is_file():
            yield path


def check_file_name(name: object) -> str:
    """Return `name` if it is a plain file name. Raise `NotRegularFileError` for a path."""
    if isinstance(name, str) and name not in ("", ".", "..") and not set(name) & {"/", "\\", "\0"}:
        return name
    raise NotRegularFileError(f"{name!r} is not a file name")


def _kind(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "a folder"
    if stat.S_ISLNK(mode):
        return "a link"
    return "a pipe" if stat.S_ISFIFO(mode) else "a device or socket"
