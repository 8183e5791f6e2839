"""Unpack image layers into a directory tree. No layer can write outside the tree.

Paths and symbolic links resolve as in a container: `/` is the top of the tree, and `..` stops there. Omit
devices and pipes, remove set-user-id bits, and ignore owners.
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
"""Maximum size in bytes and maximum number of files of one unpacked image."""
_MAX_RATIO, _SMALL = 200, 2**28  # text compresses to about a tenth; a small layer may be all zeros
_MAX_EXTENSION, _MAX_GLOBAL, _MAX_GLOBALS = 2**20, 2**16, 100
_EXTENSIONS = (
    tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)  # fmt: skip
_READ_ERRORS = (tarfile.TarError, zlib.error, EOFError, OSError, OverflowError, ValueError, RecursionError)
_MAX_NAME = 200
_MAX_WINDOW = 2**27  # bytes of memory for zstd

_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"
_MAX_LINKS, _MAX_DEPTH = 40, 200
_COPY = 1 << 20


@dataclass(slots=True)
class Unpacked:
    """Bytes and number of entries, summed over the unpacked layers."""

    bytes: int = 0
    entries: int = 0


def unpack_layers(
    layers: Sequence[Path], digests: Sequence[str], root: Path, *, owner: int | None
) -> Unpacked:
    """Unpack layers (tar files, plain, gzip or zstd) on top of each other into the empty directory `root`.

    `digests` are the digests of the uncompressed tar files. If given, `owner` becomes the user and group of
    all files. Raises PrepareError for damaged, malicious or oversized layers.
    """
    totals = Unpacked()
    if len(layers) != len(digests):
        raise PrepareError(f"the manifest lists {len(layers)} layers, and the configuration {len(digests)}")
    for number, (path, digest) in enumerate(zip(layers, digests, strict=True), 1):
        try:
            with path.open("rb") as raw:
                max_layer_bytes = max(_MAX_RATIO * os.fstat(raw.fileno()).st_size, _SMALL)
                stream = _HashedStream(_decompress(raw), min(MAX_BYTES - totals.bytes, max_layer_bytes))
                with (
                    _open_root(root) as tree,
                    tarfile.open(fileobj=stream, mode="r|", tarinfo=_Header) as layer,  # type: ignore[call-overload]
                ):
                    _Layer(tree, owner, totals).apply(layer)
                stream.drain()
        except _READ_ERRORS as error:
            raise PrepareError(f"layer {number}: {str(error)[:_MAX_NAME]}") from None
        except PrepareError as error:
            raise error.prefixed(f"layer {number}") from None
        totals.bytes += stream.count
        if f"sha256:{stream.digest.hexdigest()}" != digest:
            raise PrepareError(f"layer {number}: the content does not match the digest")
    if owner is not None:
        os.chown(root, owner, owner)
    return totals


class _HashedStream:
    """Stream that hashes and counts the bytes that are read. Raises PrepareError above a limit."""

    def __init__(self, source: IO[bytes], limit: int) -> None:
        self._source, self._limit = source, limit
        self.digest, self.count = hashlib.sha256(), 0

    def read(self, size: int) -> bytes:
        data = self._source.read(size)
        self.digest.update(data)
        self.count += len(data)
        if self.count > self._limit:
            raise PrepareError(
                f"larger than {self._limit:,} bytes unpacked; the maximum is {MAX_BYTES // 2**30} GiB for an "
                f"image, and {_MAX_RATIO} times its compressed size for a layer"
            )
        return data

    def drain(self) -> None:
        while self.read(_COPY):
            pass


@contextlib.contextmanager
def _open_root(root: Path) -> Iterator[int]:
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _decompress(raw: IO[bytes]) -> IO[bytes]:
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
                "compressed with zstd, and the package zstandard is not installed",
                code="BK-PACKAGE-MISSING",
                hint=f"install it: `{install_command('zstd')}`, or push the image with gzip",
            ) from None
        decompressor = ZstdDecompressor(max_window_size=_MAX_WINDOW)
        self._stream = decompressor.stream_reader(raw, read_across_frames=True)
        self._read_error = ZstdError

    def read(self, size: int) -> bytes:
        try:
            return self._stream.read(size)
        except self._read_error as error:
            raise OSError(str(error)) from None


class _Header(tarfile.TarInfo):
    """Tar header with a size limit.

    The limit is necessary because tarfile keeps long names and extended headers in memory.
    """

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Header:
        """Parse the header in `buf`. Raises PrepareError for an oversized header or a sparse file."""
        header = super().frombuf(buf, encoding, errors)
        if header.type == tarfile.GNUTYPE_SPARSE:
            header._refuse_sparse()
        limit = _MAX_GLOBAL if header.type == tarfile.XGLTYPE else _MAX_EXTENSION
        if header.type in _EXTENSIONS and header.size > limit:
            raise PrepareError(f"a header has {header.size:,} bytes; the maximum is {limit:,}")
        return header

    def _refuse_sparse(self, *_: object) -> NoReturn:
        # a sparse file can expand from a few bytes to any size
        raise PrepareError(f"{_shorten(self.name)} is a sparse file, which is not supported")

    _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _refuse_sparse


class _Layer:
    """Applies one layer to the tree.

    Every system call gets the descriptor of a folder and a name without a slash, so that the kernel cannot
    follow a link out of the tree.
    """

    def __init__(self, root: int, owner: int | None, totals: Unpacked) -> None:
        self._root, self._owner, self._totals = root, owner, totals
        self._inodes: set[int] = set()
        """Inodes of this layer's entries and of their parent folders.

        An opaque marker deletes the content of a folder, except entries of the same layer.
        """
        self._last_folder: tuple[str, int] | None = None
        """Path and descriptor of the last entry's folder. The next entry is usually in the same folder."""

    def apply(self, layer: tarfile.TarFile) -> None:
        """Unpack all entries of a layer, reading the tar file as a stream."""
        try:
            while (member := layer.next()) is not None:
                layer.members.clear()  # type: ignore[attr-defined]  # tarfile would keep every header
                if len(layer.pax_headers) > _MAX_GLOBALS:
                    raise PrepareError(f"more than {_MAX_GLOBALS} global attributes")
                self._totals.entries += 1
                if self._totals.entries > MAX_ENTRIES:
                    raise PrepareError(f"the image has more than {MAX_ENTRIES:,} files")
                self._apply_entry(layer, member)
        finally:
            self._close_last_folder()

    def _apply_entry(self, layer: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        parents, name = _split(member.name)
        if not name:
            return
        if name == _OPAQUE:
            self._clear(self._folder(parents))
        elif name.startswith(_WHITEOUT):
            hidden = name.removeprefix(_WHITEOUT)
            if hidden in ("", ".", ".."):
                raise PrepareError(f"{_shorten(member.name)} is not a valid whiteout entry")
            self._delete(self._folder(parents), hidden)
        else:
            self._create(layer, member, self._folder(parents), name)

    def _create(self, layer: tarfile.TarFile, member: tarfile.TarInfo, folder: int, name: str) -> None:
        if member.isdir():
            self._create_folder(folder, name, member.mode & 0o1777)
        elif member.isreg():
            self._create_file(layer, member, folder, name)
        elif member.issym():
            self._delete(folder, name)
            os.symlink(member.linkname, name, dir_fd=folder)
        elif member.islnk():
            self._create_hard_link(member, folder, name)
        else:  # omit devices and pipes
            return
        if self._owner is not None:
            os.chown(name, self._owner, self._owner, dir_fd=folder, follow_symlinks=False)
        self._inodes.add(os.lstat(name, dir_fd=folder).st_ino)

    def _create_folder(self, folder: int, name: str, mode: int) -> None:
        created = self._find_folder(folder, name)
        if created is None:
            self._delete(folder, name)
            os.mkdir(name, 0o700, dir_fd=folder)
            created = _open_folder(folder, name)
        try:
            os.fchmod(created, mode | 0o700)  # later entries may be inside this folder
        finally:
            os.close(created)

    def _create_file(self, layer: tarfile.TarFile, member: tarfile.TarInfo, folder: int, name: str) -> None:
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

    def _create_hard_link(self, member: tarfile.TarInfo, folder: int, name: str) -> None:
        parents, target_name = _split(member.linkname)
        target_folder = self._walk(parents)
        try:
            target = _find_entry(target_folder, target_name) if target_name else None
            if target is None or not stat.S_ISREG(target.st_mode):
                link, name = _shorten(member.name), _shorten(member.linkname)
                raise PrepareError(f"{link} is a hard link to {name}, which is not a file")
            existing = _find_entry(folder, name)
            if existing is not None and os.path.samestat(existing, target):
                return
            self._delete(folder, name)
            os.link(target_name, name, src_dir_fd=target_folder, dst_dir_fd=folder, follow_symlinks=False)
        finally:
            os.close(target_folder)

    def _folder(self, parts: Sequence[str]) -> int:
        """Return the descriptor of a folder inside the tree. The next call may close this descriptor."""
        key = "/".join(parts)
        if self._last_folder is None or self._last_folder[0] != key:
            self._close_last_folder()
            self._last_folder = key, self._walk(parts)
        return self._last_folder[1]

    def _walk(self, parts: Sequence[str]) -> int:
        """Return a new descriptor of the folder with the path `parts`. Create missing folders."""
        stack = [os.dup(self._root)]  # descriptors of all folders on the path, for `..`
        remaining = list(reversed(parts))
        links = 0
        try:
            while remaining:
                part = remaining.pop()
                if part in ("", "."):
                    continue
                if part == "..":
                    if len(stack) > 1:
                        os.close(stack.pop())
                    continue
                target = _link_target(stack[-1], part)
                if target is None:
                    stack.append(self._enter(stack[-1], part))
                    if len(stack) > _MAX_DEPTH:
                        raise PrepareError(f"an entry is in more than {_MAX_DEPTH} nested folders")
                    continue
                links += 1
                if links > _MAX_LINKS:
                    raise PrepareError(f"{_shorten('/'.join(parts))} has more than {_MAX_LINKS} links")
                while target.startswith("/") and len(stack) > 1:
                    os.close(stack.pop())
                remaining += reversed(target.split("/"))
            self._inodes.update(os.fstat(descriptor).st_ino for descriptor in stack)
            return os.dup(stack[-1])
        finally:
            for descriptor in stack:
                os.close(descriptor)

    def _enter(self, folder: int, name: str) -> int:
        inner = self._find_folder(folder, name)
        if inner is not None:
            return inner
        self._unlink(folder, name)
        os.mkdir(name, 0o755, dir_fd=folder)
        if self._owner is not None:
            os.chown(name, self._owner, self._owner, dir_fd=folder, follow_symlinks=False)
        return _open_folder(folder, name)

    def _find_folder(self, folder: int, name: str) -> int | None:
        """Open the folder `name`, and return its descriptor. Return None if it is not a folder."""
        try:
            return _open_folder(folder, name)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):  # ELOOP: a link
                raise
            return None

    def _clear(self, folder: int) -> None:
        for entry in os.listdir(folder):
            if os.lstat(entry, dir_fd=folder).st_ino not in self._inodes:
                self._delete(folder, entry)

    def _delete(self, folder: int, name: str) -> None:
        """Remove the entry `name`. If it is a folder, also remove its content."""
        inner = self._find_folder(folder, name)
        if inner is None:
            self._unlink(folder, name)
            return
        os.close(inner)
        shutil.rmtree(name, dir_fd=folder)
        if self._last_folder is not None and self._last_folder[1] != folder:
            self._close_last_folder()  # it may have been inside the removed folder

    def _unlink(self, folder: int, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)

    def _close_last_folder(self) -> None:
        if self._last_folder is not None:
            os.close(self._last_folder[1])
            self._last_folder = None


def _open_folder(folder: int, name: str) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(name, flags, dir_fd=folder)


def _find_entry(folder: int, name: str) -> os.stat_result | None:
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
    """Split a path into its parent folders and its last part ("" for the top of the tree)."""
    if "\0" in name:
        raise PrepareError("a file name contains a zero byte")
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise PrepareError(f"{_shorten(name)} is outside of the image")
    return parts[:-1], parts[-1] if parts else ""


def _shorten(name: str) -> str:
    return repr(name if len(name) <= _MAX_NAME else f"{name[:_MAX_NAME]}...")
