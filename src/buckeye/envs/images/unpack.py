"""Layers become a directory tree. Nothing in a layer can reach outside of that tree.

Every name is followed as inside of the tree: `/` is its top, `..` stops there, and a link in an earlier layer
leads to where it would lead in a container. Devices and pipes are left out, set-user-id bits taken off,
owners ignored.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
import shutil
import tarfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from buckeye.distribution import install_command
from buckeye.envs.runtimes.base import PrepareError

MAX_BYTES, MAX_ENTRIES = 64 * 2**30, 2_000_000
"""Of one image, unpacked."""

_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"
_MAX_LINKS, _MAX_DEPTH = 40, 200
_COPY = 1 << 20


@dataclass(slots=True)
class Unpacked:
    """What was done, over all layers."""

    bytes: int = 0
    entries: int = 0
    left_out: int = 0
    """Devices and pipes."""


def unpack_layers(
    layers: Sequence[Path], digests: Sequence[str], root: Path, *, owner: int | None
) -> Unpacked:
    """Lay the layers (tar files, plain, gzip or zstd) over each other in the empty directory `root`.

    `digests` are those of the uncompressed tar files; `owner` is the user and group that everything then
    belongs to. Raises PrepareError for damaged, malicious or oversized layers.
    """
    done = Unpacked()
    if len(layers) != len(digests):
        raise PrepareError(f"the image has {len(layers)} layers and says it has {len(digests)}.")
    for number, (path, digest) in enumerate(zip(layers, digests, strict=True), 1):
        try:
            with path.open("rb") as raw:
                stream = _Hashing(_decompressed(raw), MAX_BYTES - done.bytes)
                with tarfile.open(fileobj=stream, mode="r|") as layer:  # type: ignore[call-overload]
                    _Layer(root, owner, done).apply(layer)
                stream.drain()
        except (tarfile.TarError, zlib.error, EOFError, OSError, OverflowError, ValueError) as error:
            raise PrepareError(f"layer {number} cannot be unpacked: {error}") from None
        done.bytes += stream.count
        if f"sha256:{stream.digest.hexdigest()}" != digest:
            raise PrepareError(
                f"layer {number} is damaged: its content has another digest than the image says."
            )
    if owner is not None:
        os.chown(root, owner, owner)
    return done


class _Hashing:
    """Reads through, counts and hashes."""

    def __init__(self, source: IO[bytes], limit: int) -> None:
        self._source, self._limit = source, limit
        self.digest, self.count = hashlib.sha256(), 0

    def read(self, size: int) -> bytes:
        data = self._source.read(size)
        self.digest.update(data)
        self.count += len(data)
        if self.count > self._limit:
            raise PrepareError(f"the image is larger than {MAX_BYTES // 2**30} GiB unpacked.")
        return data

    def drain(self) -> None:
        while self.read(_COPY):
            pass


def _decompressed(raw: IO[bytes]) -> IO[bytes]:
    magic = raw.read(4)
    raw.seek(0)
    if magic[:2] == b"\x1f\x8b":
        return gzip.GzipFile(fileobj=raw)  # type: ignore[return-value]
    if magic == b"\x28\xb5\x2f\xfd":
        return _Zstd(raw)  # type: ignore[return-value]
    return raw


class _Zstd:
    """Reads what was compressed with zstd. Raises PrepareError where no package for it is installed."""

    def __init__(self, raw: IO[bytes]) -> None:
        try:
            from zstandard import ZstdDecompressor, ZstdError
        except ModuleNotFoundError:
            raise PrepareError(
                "the image's layers are compressed with zstd. Push it with gzip, or install what reads them: "
                + install_command("zstd")
            ) from None
        self._stream = ZstdDecompressor().stream_reader(raw, read_across_frames=True)
        self._damage = ZstdError

    def read(self, size: int) -> bytes:
        try:
            return self._stream.read(size)
        except self._damage as error:
            raise OSError(str(error)) from None


class _Layer:
    """One layer onto the tree."""

    def __init__(self, root: Path, owner: int | None, done: Unpacked) -> None:
        self._root, self._owner, self._done = os.fspath(root), owner, done
        self._mine: set[str] = set()
        """What this layer itself has put there: its own opaque markers spare it."""

    def apply(self, layer: tarfile.TarFile) -> None:
        modes: list[tuple[str, int]] = []
        for member in layer:
            self._done.entries += 1
            if self._done.entries > MAX_ENTRIES:
                raise PrepareError(f"the image has more than {MAX_ENTRIES} files.")
            parent, name = self._place(member.name)
            if not name:
                continue
            if name == _OPAQUE:
                self._clear(parent)
            elif name.startswith(_WHITEOUT):
                hidden = name.removeprefix(_WHITEOUT)
                if hidden in ("", ".", ".."):
                    raise PrepareError(f"{member.name!r} hides nothing that can be named.")
                _delete(os.path.join(parent, hidden))
            else:
                self._make(layer, member, os.path.join(parent, name), modes)
        for path, mode in reversed(modes):  # a folder without write permission gets its files first
            with contextlib.suppress(FileNotFoundError):
                if not os.path.islink(path):
                    os.chmod(path, mode)

    def _make(
        self, layer: tarfile.TarFile, member: tarfile.TarInfo, path: str, modes: list[tuple[str, int]]
    ) -> None:
        if member.isdir():
            if os.path.islink(path) or not os.path.isdir(path):
                _delete(path)
                os.mkdir(path, 0o700)
            os.chmod(path, 0o700 | (member.mode & 0o1777))
            modes.append((path, (member.mode & 0o1777) | 0o700))
        elif member.issparse():  # a few bytes that stand for any number of them
            raise PrepareError(f"{member.name!r} is a sparse file, which is not read.")
        elif member.isreg():
            _delete(path)
            source = layer.extractfile(member)
            assert source is not None
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
            with open(descriptor, "wb") as file:
                shutil.copyfileobj(source, file, _COPY)
                os.fchmod(descriptor, member.mode & 0o777)
            os.utime(path, (member.mtime, member.mtime), follow_symlinks=False)
        elif member.issym():
            _delete(path)
            os.symlink(member.linkname, path)
        elif member.islnk():
            target = os.path.join(*self._place(member.linkname))
            if os.path.islink(target) or not os.path.isfile(target):
                raise PrepareError(
                    f"{member.name!r} is a hard link to {member.linkname!r}, which is no file."
                )
            if target != path:
                _delete(path)
                os.link(target, path, follow_symlinks=False)
        else:
            self._done.left_out += 1
            return
        if self._owner is not None:
            os.chown(path, self._owner, self._owner, follow_symlinks=False)
        self._mine.add(path)

    def _place(self, name: str) -> tuple[str, str]:
        """Where an entry goes: its real folder inside the tree, made if need be, and its last name ("" for
        the top)."""
        if "\0" in name:
            raise PrepareError("a file's name holds a zero byte.")
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if ".." in parts:
            raise PrepareError(f"{name!r} leads out of its layer.")
        if not parts:
            return self._root, ""
        return self._folder(parts[:-1]), parts[-1]

    def _folder(self, parts: Sequence[str]) -> str:
        here: list[str] = []
        waiting = list(reversed(parts))
        links = 0
        while waiting:
            part = waiting.pop()
            if part in ("", "."):
                continue
            if part == "..":
                here = here[:-1]
                continue
            path = os.path.join(self._root, *here, part)
            if os.path.islink(path):
                links += 1
                if links > _MAX_LINKS:
                    raise PrepareError(f"{'/'.join(parts)!r} goes round in links.")
                target = os.readlink(path)
                if target.startswith("/"):
                    here = []
                waiting += reversed(target.split("/"))
                continue
            if not os.path.isdir(path):
                _delete(path)
                os.mkdir(path, 0o755)
                if self._owner is not None:
                    os.chown(path, self._owner, self._owner)
            here.append(part)
            if len(here) > _MAX_DEPTH:
                raise PrepareError(f"an entry lies in more than {_MAX_DEPTH} folders.")
        return os.path.join(self._root, *here)

    def _clear(self, folder: str) -> None:
        for entry in os.listdir(folder):
            path = os.path.join(folder, entry)
            if path not in self._mine and not any(mine.startswith(path + "/") for mine in self._mine):
                _delete(path)


def _delete(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
