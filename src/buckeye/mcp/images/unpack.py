"""Unpack layers into a directory tree. No layer can reach outside the tree.

Names are resolved inside the tree: `/` is its top, `..` stops there, and a link of an earlier layer leads
where it would lead in a container. Devices and pipes are omitted, set-user-id bits are removed, and owners
are ignored.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import os
import shutil
import stat
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

from buckeye.base.distribution import install_command
from buckeye.mcp.sandbox.runtime import PrepareError

MAX_BYTES, MAX_ENTRIES = 64 * 2**30, 1_000_000
"""Maximum bytes and entries of one image, unpacked."""
_MAX_RATIO, _SMALL = 200, 2**28  # text compresses to about a tenth; a small layer may be all zeros
_MAX_EXTENSION, _MAX_GLOBAL, _MAX_GLOBALS = 2**20, 2**16, 100
_EXTENSIONS = (
    tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)  # fmt: skip
_DAMAGE = (tarfile.TarError, zlib.error, EOFError, OSError, OverflowError, ValueError, RecursionError)
_SHOWN = 200
_MAX_WINDOW = 2**27  # bytes of memory for zstd

_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"
_MAX_LINKS, _MAX_DEPTH = 40, 200
_COPY = 1 << 20


@dataclass(slots=True)
class Unpacked:
    """Totals over all layers."""

    bytes: int = 0
    entries: int = 0
    left_out: int = 0
    """Number of omitted devices and pipes."""


def unpack_layers(
    layers: Sequence[Path], digests: Sequence[str], root: Path, *, owner: int | None
) -> Unpacked:
    """Unpack layers (tar files, plain, gzip or zstd) over each other into the empty directory `root`.

    `digests` are those of the uncompressed tar files. `owner` becomes the user and group of all files. Raises
    PrepareError for damaged, malicious or oversized layers.
    """
    done = Unpacked()
    if len(layers) != len(digests):
        raise PrepareError(f"the image has {len(layers)} layers and says it has {len(digests)}.")
    for number, (path, digest) in enumerate(zip(layers, digests, strict=True), 1):
        try:
            with path.open("rb") as raw:
                packed = os.fstat(raw.fileno()).st_size
                most = max(_MAX_RATIO * packed, _SMALL)
                stream = _Hashing(_decompressed(raw), min(MAX_BYTES - done.bytes, most))
                with (
                    _opened(root) as tree,
                    tarfile.open(fileobj=stream, mode="r|", tarinfo=_Header) as layer,  # type: ignore[call-overload]
                ):
                    _Layer(tree, owner, done).apply(layer)
                stream.drain()
        except _DAMAGE as error:
            raise PrepareError(f"layer {number} cannot be unpacked: {str(error)[:_SHOWN]}") from None
        except PrepareError as error:
            raise PrepareError(f"layer {number}: {error}") from None
        done.bytes += stream.count
        if f"sha256:{stream.digest.hexdigest()}" != digest:
            raise PrepareError(
                f"layer {number} is damaged: its content has another digest than the image says."
            )
    if owner is not None:
        os.chown(root, owner, owner)
    return done


class _Hashing:
    """Stream wrapper that counts and hashes the bytes read, with a limit."""

    def __init__(self, source: IO[bytes], limit: int) -> None:
        self._source, self._limit = source, limit
        self.digest, self.count = hashlib.sha256(), 0

    def read(self, size: int) -> bytes:
        data = self._source.read(size)
        self.digest.update(data)
        self.count += len(data)
        if self.count > self._limit:
            raise PrepareError(
                f"it is larger than {self._limit} bytes unpacked. An image may have {MAX_BYTES // 2**30} GiB "
                f"and a layer {_MAX_RATIO} times what it has packed."
            )
        return data

    def drain(self) -> None:
        while self.read(_COPY):
            pass


@contextlib.contextmanager
def _opened(root: Path) -> Iterator[int]:
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _decompressed(raw: IO[bytes]) -> IO[bytes]:
    magic = raw.read(4)
    raw.seek(0)
    if magic[:2] == b"\x1f\x8b":
        return gzip.GzipFile(fileobj=raw)  # type: ignore[return-value]
    if magic == b"\x28\xb5\x2f\xfd":
        return _Zstd(raw)  # type: ignore[return-value]
    return raw


class _Zstd:
    """Stream that decompresses zstd. Raises PrepareError if no zstd package is installed."""

    def __init__(self, raw: IO[bytes]) -> None:
        try:
            from zstandard import ZstdDecompressor, ZstdError
        except ModuleNotFoundError:
            raise PrepareError(
                "the image's layers are compressed with zstd. Push it with gzip, or install what reads them: "
                + install_command("zstd")
            ) from None
        decompressor = ZstdDecompressor(max_window_size=_MAX_WINDOW)
        self._stream = decompressor.stream_reader(raw, read_across_frames=True)
        self._damage = ZstdError

    def read(self, size: int) -> bytes:
        try:
            return self._stream.read(size)
        except self._damage as error:
            raise OSError(str(error)) from None


class _Header(tarfile.TarInfo):
    """Tar header with a size limit.

    tarfile keeps long names, extended headers and the maps of sparse files completely in memory.
    """

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Header:
        """Return the header in a block. Raises PrepareError for an oversized header or a sparse file."""
        header = super().frombuf(buf, encoding, errors)
        if header.type == tarfile.GNUTYPE_SPARSE:
            header._refuse_sparse()
        most = _MAX_GLOBAL if header.type == tarfile.XGLTYPE else _MAX_EXTENSION
        if header.type in _EXTENSIONS and header.size > most:
            raise PrepareError(
                f"a header declares {header.size} bytes of names and attributes; {most} are read."
            )
        return header

    def _refuse_sparse(self, *_: object) -> NoReturn:
        # a sparse file can expand from a few bytes to any size
        raise PrepareError(f"{_shown(self.name)} is a sparse file, which is not read.")

    _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _refuse_sparse


class _Layer:
    """Applies one layer to the tree.

    No path of several parts is ever passed to the system. Every step uses the descriptor of a folder and a
    name without a slash, and the system never follows a link.
    """

    def __init__(self, root: int, owner: int | None, done: Unpacked) -> None:
        self._root, self._owner, self._done = root, owner, done
        self._mine: set[int] = set()
        """Inodes of this layer's entries and of their folders. Its own opaque markers keep them."""
        self._last: tuple[str, int] | None = None
        """Folder of the last entry and its descriptor, because the next entry is usually in it too."""

    def apply(self, layer: tarfile.TarFile) -> None:
        """Unpack all entries of a layer that is read as a stream."""
        try:
            while (member := layer.next()) is not None:
                layer.members.clear()  # type: ignore[attr-defined]  # tarfile would keep every header
                if len(layer.pax_headers) > _MAX_GLOBALS:
                    raise PrepareError(f"more than {_MAX_GLOBALS} attributes are given to all files.")
                self._done.entries += 1
                if self._done.entries > MAX_ENTRIES:
                    raise PrepareError(f"the image has more than {MAX_ENTRIES} files.")
                self._entry(layer, member)
        finally:
            self._forget()

    def _entry(self, layer: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        above, name = _split(member.name)
        if not name:
            return
        if name == _OPAQUE:
            self._clear(self._folder(above))
        elif name.startswith(_WHITEOUT):
            hidden = name.removeprefix(_WHITEOUT)
            if hidden in ("", ".", ".."):
                raise PrepareError(f"{_shown(member.name)} hides nothing that can be named.")
            self._delete(self._folder(above), hidden)
        else:
            self._make(layer, member, self._folder(above), name)

    def _make(self, layer: tarfile.TarFile, member: tarfile.TarInfo, folder: int, name: str) -> None:
        if member.isdir():
            self._make_folder(folder, name, member.mode & 0o1777)
        elif member.isreg():
            self._make_file(layer, member, folder, name)
        elif member.issym():
            self._delete(folder, name)
            os.symlink(member.linkname, name, dir_fd=folder)
        elif member.islnk():
            self._make_hard_link(member, folder, name)
        else:
            self._done.left_out += 1
            return
        if self._owner is not None:
            os.chown(name, self._owner, self._owner, dir_fd=folder, follow_symlinks=False)
        self._mine.add(os.lstat(name, dir_fd=folder).st_ino)

    def _make_folder(self, folder: int, name: str, mode: int) -> None:
        made = self._step(folder, name)
        if made is None:
            self._delete(folder, name)
            os.mkdir(name, 0o700, dir_fd=folder)
            made = _open_folder(folder, name)
        try:
            os.fchmod(made, mode | 0o700)  # later entries must be able to enter it
        finally:
            os.close(made)

    def _make_file(self, layer: tarfile.TarFile, member: tarfile.TarInfo, folder: int, name: str) -> None:
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(name, flags, 0o600, dir_fd=folder)
        except FileExistsError:
            self._delete(folder, name)
            descriptor = os.open(name, flags, 0o600, dir_fd=folder)
        source = layer.extractfile(member)
        assert source is not None
        with open(descriptor, "wb") as file:
            shutil.copyfileobj(source, file, _COPY)
            file.flush()
            os.fchmod(descriptor, member.mode & 0o777)
            os.utime(descriptor, (member.mtime, member.mtime))

    def _make_hard_link(self, member: tarfile.TarInfo, folder: int, name: str) -> None:
        above, of = _split(member.linkname)
        there = self._walk(above)
        try:
            found = _seen(there, of) if of else None
            if found is None or not stat.S_ISREG(found.st_mode):
                raise PrepareError(
                    f"{_shown(member.name)} is a hard link to {_shown(member.linkname)}, which is no file."
                )
            present = _seen(folder, name)
            if present is not None and os.path.samestat(present, found):
                return
            self._delete(folder, name)
            os.link(of, name, src_dir_fd=there, dst_dir_fd=folder, follow_symlinks=False)
        finally:
            os.close(there)

    def _folder(self, parts: Sequence[str]) -> int:
        """Return the descriptor of a folder inside the tree. It is closed by the next call."""
        key = "/".join(parts)
        if self._last is None or self._last[0] != key:
            self._forget()
            self._last = key, self._walk(parts)
        return self._last[1]

    def _walk(self, parts: Sequence[str]) -> int:
        """Return a new descriptor of the folder that `parts` lead to. Missing folders are created."""
        way = [os.dup(self._root)]  # folders on the path down; `..` returns to the last of them
        waiting = list(reversed(parts))
        links = 0
        try:
            while waiting:
                part = waiting.pop()
                if part in ("", "."):
                    continue
                if part == "..":
                    if len(way) > 1:
                        os.close(way.pop())
                    continue
                target = _link_target(way[-1], part)
                if target is None:
                    way.append(self._enter(way[-1], part))
                    if len(way) > _MAX_DEPTH:
                        raise PrepareError(f"an entry lies in more than {_MAX_DEPTH} folders.")
                    continue
                links += 1
                if links > _MAX_LINKS:
                    raise PrepareError(f"{_shown('/'.join(parts))} goes round in links.")
                while target.startswith("/") and len(way) > 1:
                    os.close(way.pop())
                waiting += reversed(target.split("/"))
            self._mine.update(os.fstat(one).st_ino for one in way)
            return os.dup(way[-1])
        finally:
            for one in way:
                os.close(one)

    def _enter(self, folder: int, name: str) -> int:
        inside = self._step(folder, name)
        if inside is not None:
            return inside
        self._unlink(folder, name)
        os.mkdir(name, 0o755, dir_fd=folder)
        if self._owner is not None:
            os.chown(name, self._owner, self._owner, dir_fd=folder, follow_symlinks=False)
        return _open_folder(folder, name)

    def _step(self, folder: int, name: str) -> int | None:
        """Return the opened folder of that name; None if it does not exist or is not a folder."""
        try:
            return _open_folder(folder, name)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):  # ELOOP: a link
                raise
            return None

    def _clear(self, folder: int) -> None:
        for entry in os.listdir(folder):
            if os.lstat(entry, dir_fd=folder).st_ino not in self._mine:
                self._delete(folder, entry)

    def _delete(self, folder: int, name: str) -> None:
        """Remove the entry of that name, and a folder with its content."""
        inside = self._step(folder, name)
        if inside is None:
            self._unlink(folder, name)
            return
        os.close(inside)
        shutil.rmtree(name, dir_fd=folder)
        if self._last is not None and self._last[1] != folder:
            self._forget()  # the cached folder may have been inside

    def _unlink(self, folder: int, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)

    def _forget(self) -> None:
        if self._last is not None:
            os.close(self._last[1])
            self._last = None


def _open_folder(folder: int, name: str) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(name, flags, dir_fd=folder)


def _seen(folder: int, name: str) -> os.stat_result | None:
    try:
        return os.lstat(name, dir_fd=folder)
    except FileNotFoundError:
        return None


def _link_target(folder: int, name: str) -> str | None:
    try:
        return os.readlink(name, dir_fd=folder)
    except OSError:
        return None


def _split(name: str) -> tuple[list[str], str]:
    """Return the folders above an entry and its last name ("" for the top of the tree)."""
    if "\0" in name:
        raise PrepareError("a file's name holds a zero byte.")
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise PrepareError(f"{_shown(name)} leads out of its layer.")
    return parts[:-1], parts[-1] if parts else ""


def _shown(name: str) -> str:
    return repr(name if len(name) <= _SHOWN else f"{name[:_SHOWN]}...")
