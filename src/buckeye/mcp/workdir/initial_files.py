"""Copy the initial files of a rollout from a folder, an archive, a single file, or the output of a script."""

from __future__ import annotations

import functools
import gzip
import hashlib
import lzma
import os
import shutil
import stat
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from buckeye.base.process import clean_environment
from buckeye.base.storage import sha256_file, write_directory
from buckeye.config.shared import BaseConfig
from buckeye.errors import UsageError
from buckeye.mcp.client.errors import is_transient
from buckeye.mcp.sandbox.runtime import cache_folder, check_output

MAX_ENTRIES = 200_000
"""Maximum number of initial files and folders of a rollout."""
_Config = TypeVar("_Config", bound=BaseConfig)
_SCRIPT_SECONDS = 600.0
_SCRIPTS = {".py": (sys.executable,), ".sh": ("/bin/sh",)}
_DAMAGED = (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, RuntimeError)
"""Errors of an archive: damaged, encrypted, or packed with an unknown method (a `RuntimeError`)."""

_TARS = (".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz")


def resolve_files(config: _Config, file: Path) -> _Config:
    """Return a copy of a task or configuration whose `files` is an absolute path.

    A relative path starts at the folder of `file`, which contains the task or configuration.
    """
    files: str | None = getattr(config, "files", None)
    if files is None:
        return config
    return config.model_copy(update={"files": str(file.absolute().parent / Path(os.path.expanduser(files)))})


@dataclass(frozen=True, slots=True)
class SizeLimit:
    """Maximum bytes of initial files. `setting` is the name of the user's setting, or "" if fixed."""

    bytes: int
    setting: str = ""

    def check(self, source: Path, total: int, entries: int) -> None:
        """Raise UsageError if the content of `source` is too large or has more than `MAX_ENTRIES` entries."""
        if total > self.bytes:
            excess, hint = f"{self.bytes:,} bytes", f"raise `{self.setting}`" if self.setting else ""
        elif entries > MAX_ENTRIES:
            excess, hint = f"{MAX_ENTRIES:,} files and folders", "pack some of them"
        else:
            return
        raise _error(
            f"{source} has more than {excess}", f"remove files, or {hint}" if hint else "remove files"
        )


def prepare_files(files: str, folder: Path, limit: SizeLimit) -> None:
    """Copy the initial files from the absolute path `files` to an empty folder.

    Raises UsageError for invalid files, and OSError or another BuckeyeError for a failure that a retry may
    avoid.
    """
    source = Path(files)
    if not source.exists():
        raise UsageError(f"file or folder not found: {source}", code="BK-FILE-NOT-FOUND", at="files")
    if not source.is_dir() and not source.is_file():
        raise _special_file_error(source)
    try:
        if source.is_dir():
            copy_tree(source, folder, limit)
        elif source.suffix == ".zip":
            _unzip(source, folder, limit)
        elif source.name.endswith(_TARS):
            _untar(source, folder, limit)
        elif source.suffix in _SCRIPTS:
            copy_tree(_run_script_once(source), folder, limit)
        else:
            _copy_file(source, folder / source.name)
    except (OSError, EOFError, *_DAMAGED) as error:
        if is_transient(error):
            raise
        raise _error(f"cannot read {source}: {error}") from None


def pack_files(files: str, to: Path, limit: SizeLimit) -> str:
    """Write an archive of initial files into the folder `to`. Return the archive's name, which is its hash.

    If `files` is a script, the archive contains the files that the script creates. Raises BuckeyeError or
    OSError.
    """
    with tempfile.TemporaryDirectory(dir=to, prefix=".") as temporary:
        folder, packed = Path(temporary, "files"), Path(temporary, "packed")
        folder.mkdir()
        prepare_files(files, folder, limit)
        with (
            gzip.GzipFile(packed, "wb", mtime=0) as zipped,
            tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            for path in sorted(_walk(folder)):
                archive.add(path, str(path.relative_to(folder)), recursive=False, filter=_without_owner)
        name = f"{sha256_file(packed)}.tar.gz"
        packed.replace(to / name)
    return name


def _without_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Remove the owner of an archive entry, and the time of folders and links. The hash must not vary."""
    modified = int(entry.mtime) if entry.isreg() else 0
    return entry.replace(uid=0, gid=0, uname="", gname="", mtime=modified, deep=False)


def copy_tree(source: Path, to: Path, limit: SizeLimit) -> int:
    """Copy a folder's content into an empty folder, and return the number of bytes.

    Copies share disk blocks with the source if the file system supports this. They are not hard links,
    because servers write to the copies. Raises UsageError above the limit or for a special file.
    """
    total, entries = 0, 0
    for path in _walk(source):
        target, entries = to / path.relative_to(source), entries + 1
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode):
            target.mkdir(mode=0o700)
        elif stat.S_ISLNK(mode):
            os.symlink(_check_link(path, source), target)
        elif stat.S_ISREG(mode):
            total += _copy_file(path, target)
        else:
            raise _special_file_error(path)
        limit.check(source, total, entries)
    for path in reversed([path for path in _walk(source) if path.is_dir() and not path.is_symlink()]):
        shutil.copystat(path, to / path.relative_to(source))
    return total


def _special_file_error(path: Path) -> UsageError:
    return _error(f"{path} is neither a file nor a folder", "remove it")


def _walk(folder: Path) -> Iterator[Path]:
    """Yield all files and folders in a folder, each folder before its content."""
    for entry in os.scandir(folder):
        yield Path(entry.path)
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(Path(entry.path))


def _check_link(path: Path, root: Path) -> str:
    """Return the target of the symbolic link `path`. Raises UsageError if the target is outside `root`."""
    target = os.readlink(path)
    resolved = os.path.normpath(path.parent / target)
    if os.path.isabs(target) or not Path(resolved).is_relative_to(os.path.normpath(root)):
        raise _error(
            f"{path} is a link to {target} outside the folder, so all rollouts would share the target",
            "replace the link by a copy",
        )
    return target


def _copy_file(source: Path, target: Path) -> int:
    with source.open("rb") as reader, target.open("xb") as writer:
        status = os.fstat(reader.fileno())
        try:
            remaining = status.st_size
            while remaining and (copied := os.copy_file_range(reader.fileno(), writer.fileno(), remaining)):
                remaining -= copied
        except OSError:  # not supported between these file systems
            reader.seek(0)
            writer.seek(0)
            shutil.copyfileobj(reader, writer)
        os.fchmod(writer.fileno(), stat.S_IMODE(status.st_mode) & 0o777)
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
    return status.st_size


def _unzip(source: Path, folder: Path, limit: SizeLimit) -> None:
    with zipfile.ZipFile(source) as archive:
        entries = archive.infolist()
        limit.check(source, sum(entry.file_size for entry in entries), len(entries))
        for entry in entries:
            if entry.filename.startswith("/") or ".." in entry.filename.split("/"):
                raise _error(f"{source}: {entry.filename!r} is outside of the archive", "remove it")
            if stat.S_ISLNK(entry.external_attr >> 16):
                raise _error(f"{source}: {entry.filename!r} is a link", "replace the link by a copy")
            extracted = archive.extract(entry, folder)
            if mode := entry.external_attr >> 16 & 0o777:
                os.chmod(extracted, mode | 0o700 if entry.is_dir() else mode)


def _error(message: str, hint: str | None = None) -> UsageError:
    return UsageError(message, code="BK-FILE-UNREADABLE", at="files", hint=hint)


def _untar(source: Path, folder: Path, limit: SizeLimit) -> None:
    """Extract a tar archive. The filter `data` rejects devices, `..`, and links out of the archive."""
    total = count = 0
    with tarfile.open(source, "r|*") as archive:
        for entry in archive:
            total, count = total + entry.size, count + 1
            limit.check(source, total, count)
            archive.extract(entry, folder, filter="data")


def _run_script_once(script: Path) -> Path:
    """Return a folder with the files that a script creates.

    The script only runs if the cache has no result for its text.
    """
    text = script.read_bytes()
    final = cache_folder() / "files" / hashlib.sha256(text).hexdigest()[:32]
    if not final.is_dir():
        with suppress(FileExistsError):  # another process was faster
            final.parent.mkdir(parents=True, exist_ok=True)
            write_directory(final, functools.partial(_run_script, script))
    return final


def _run_script(script: Path, folder: Path) -> None:
    """Run a script in a folder. A failure raises PrepareError, because a retry may succeed."""
    argv, env = [*_SCRIPTS[script.suffix], str(script)], clean_environment({})
    check_output(argv, _SCRIPT_SECONDS, f"{script} failed", code="BK-ENV-FAILED", env=env, cwd=folder)
