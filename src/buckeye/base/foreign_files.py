"""Files that somebody else may have put where they are: read only if they are what they should be.

Only the standard library is imported: vLLM's workers, in an environment of their own, load this file too.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

MAX_TEXT_BYTES = 256 * 2**20
"""Of a file that is read as a whole: the largest tokenizers and indexes are a tenth of that."""


class NotRegularError(ValueError):
    """A pipe, a device, a folder or a link stands where a file should, or the file is too large."""


def read_regular(path: Path, *, limit: int = MAX_TEXT_BYTES) -> bytes:
    """What is in a regular file of at most `limit` bytes. A pipe is not waited for.

    Raises OSError for one that cannot be opened, NotRegularError for what is no such file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise NotRegularError(f"{path} is {_kind(found.st_mode)}, and no file")
        content = file.read(limit + 1) if found.st_size <= limit else b""
    if found.st_size > limit or len(content) > limit:
        raise NotRegularError(f"{path} has more than {limit} bytes")
    return content


def data_folder(path: Path, root: Path) -> Path:
    """The folder `path` with every link followed, if it is below `root` and holds files and folders only.

    Raises OSError for what cannot be read, NotRegularError for a folder elsewhere and for what is no file.
    """
    real, allowed = path.resolve(), root.resolve()
    if not real.is_relative_to(allowed):
        raise NotRegularError(f"{path} is not below {allowed}, where this server takes weights from")
    with os.scandir(real) as entries:
        for entry in entries:
            mode = entry.stat(follow_symlinks=False).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise NotRegularError(f"{entry.path} is {_kind(mode)}, and no file")
    return real


def own_files(folder: Path) -> Iterator[Path]:
    """The files of a model's folder, sorted, also those in folders of it. A link counts as its file where
    that is in the folder too, or among the blobs of the cache that the folder is in.

    Raises NotRegularError for a link that leads elsewhere: its file would be copied as one of the model.
    """
    top = folder.resolve()
    blobs = top.parent.parent / "blobs" if top.parent.name == "snapshots" else top
    for path in sorted(folder.rglob("*")):
        real = path.resolve()
        if path.is_symlink() and not (real.is_relative_to(top) or real.is_relative_to(blobs)):
            raise NotRegularError(f"{path} is a link that leads out of the model's folder, to {real}")
        if path.is_file():
            yield path


def plain_name(name: object) -> str:
    """`name` if it is that of a file right in a folder. Raises NotRegularError for a path."""
    if isinstance(name, str) and name not in ("", ".", "..") and not set(name) & {"/", "\\", "\0"}:
        return name
    raise NotRegularError(f"{name!r} is not the name of a file")


def _kind(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "a folder"
    if stat.S_ISLNK(mode):
        return "a link"
    return "a pipe" if stat.S_ISFIFO(mode) else "a device or socket"
