"""Initial files of a rollout: a folder, an archive, a script that creates them, or a single file."""

from __future__ import annotations

import functools
import gzip
import hashlib
import os
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from buckeye.base.process import clean_environment
from buckeye.base.storage import sha256_file, write_directory
from buckeye.config.shared import BaseConfig
from buckeye.errors import UsageError
from buckeye.mcp.sandbox.runtime import cache_folder

MAX_ENTRIES = 200_000
"""Maximum number of initial files and folders of a rollout."""
_Written = TypeVar("_Written", bound=BaseConfig)
_SCRIPT_SECONDS = 600.0
_SCRIPTS = {".py": (sys.executable,), ".sh": ("/bin/sh",)}
_TARS = (".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz")


def resolve_files(written: _Written, file: Path) -> _Written:
    """Return a task or configuration with an absolute path as its `files`, resolved relative to `file`."""
    files: str | None = getattr(written, "files", None)
    if files is None:
        return written
    return written.model_copy(update={"files": str(file.absolute().parent / Path(files).expanduser())})


def prepare_files(files: str, folder: Path, max_bytes: int) -> None:
    """Put the files that `files` (an absolute path) names into an empty folder.

    Raises UsageError, also for more than `max_bytes` bytes.
    """
    source = Path(files)
    if not source.exists():
        raise UsageError(f"files: there is no file or folder {source}")
    try:
        if source.is_dir():
            copy_tree(source, folder, max_bytes)
        elif source.suffix == ".zip":
            _unzip(source, folder, max_bytes)
        elif source.name.endswith(_TARS):
            _untar(source, folder, max_bytes)
        elif source.suffix in _SCRIPTS:
            copy_tree(_made_by(source), folder, max_bytes)
        else:
            _copy_file(source, folder / source.name)
    except (OSError, tarfile.TarError, zipfile.BadZipFile, EOFError) as error:
        raise UsageError(f"files: {source} cannot be used: {error}") from None


def pack_files(files: str, to: Path, max_bytes: int) -> str:
    """Write an archive of initial files into the folder `to`, and return its name, the hash of its bytes.

    For a script, the archive has the files it creates, not the script. Raises UsageError.
    """
    with tempfile.TemporaryDirectory(dir=to, prefix=".") as temporary:
        folder, made = Path(temporary, "files"), Path(temporary, "packed")
        folder.mkdir()
        prepare_files(files, folder, max_bytes)
        with (
            gzip.GzipFile(made, "wb", mtime=0) as zipped,
            tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            for path in sorted(_walk(folder)):
                archive.add(path, str(path.relative_to(folder)), recursive=False, filter=_nobodys)
        name = f"{sha256_file(made)}.tar.gz"
        made.replace(to / name)
    return name


def _nobodys(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return an archive entry without its owner. Links and folders have no modification time."""
    made = int(entry.mtime) if entry.isreg() else 0
    return entry.replace(uid=0, gid=0, uname="", gname="", mtime=made, deep=False)


def copy_tree(source: Path, to: Path, max_bytes: int) -> int:
    """Copy a folder's content into an empty folder, and return the number of bytes.

    Copies share disk blocks with the source where the file system supports it. They are never hard links,
    because servers write to them. Raises UsageError for more than `max_bytes` bytes and for special files.
    """
    total, entries = 0, 0
    for path in _walk(source):
        below, seen = path.relative_to(source), path.lstat()
        target, entries = to / below, entries + 1
        if stat.S_ISDIR(seen.st_mode):
            target.mkdir(mode=0o700)
        elif stat.S_ISLNK(seen.st_mode):
            os.symlink(_inner_link(path, source), target)
        elif stat.S_ISREG(seen.st_mode):
            total += _copy_file(path, target)
        else:
            raise UsageError(f"files: {path} is neither a file nor a folder; leave it out")
        if total > max_bytes or entries > MAX_ENTRIES:
            raise _too_much(source, max_bytes)
    for path in reversed([one for one in _walk(source) if one.is_dir() and not one.is_symlink()]):
        shutil.copystat(path, to / path.relative_to(source))
    return total


def _walk(folder: Path) -> Iterator[Path]:
    """Yield everything in a folder, each folder before its content."""
    for entry in os.scandir(folder):
        yield Path(entry.path)
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(Path(entry.path))


def _inner_link(path: Path, root: Path) -> str:
    target = os.readlink(path)
    there = os.path.normpath(path.parent / target)
    if os.path.isabs(target) or not Path(there).is_relative_to(os.path.normpath(root)):
        raise UsageError(
            f"files: {path} is a link that leads out of the folder, to {target}: all rollouts would share "
            "that. Put a copy there"
        )
    return target


def _copy_file(source: Path, target: Path) -> int:
    with source.open("rb") as reading, target.open("xb") as writing:
        seen = os.fstat(reading.fileno())
        try:
            left = seen.st_size
            while left and (done := os.copy_file_range(reading.fileno(), writing.fileno(), left)):
                left -= done
        except (OSError, AttributeError):  # not supported between these file systems, or not on Linux
            reading.seek(0)
            writing.seek(0)
            shutil.copyfileobj(reading, writing)
        os.fchmod(writing.fileno(), stat.S_IMODE(seen.st_mode) & 0o777)
    os.utime(target, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    return seen.st_size


def _too_much(source: Path, max_bytes: int) -> UsageError:
    return UsageError(
        f"files: {source} holds more than {max_bytes:,} bytes (defaults.workdir_bytes) or {MAX_ENTRIES:,} files"
    )


def _unzip(source: Path, folder: Path, max_bytes: int) -> None:
    with zipfile.ZipFile(source) as archive:
        entries = archive.infolist()
        if sum(one.file_size for one in entries) > max_bytes or len(entries) > MAX_ENTRIES:
            raise _too_much(source, max_bytes)
        for one in entries:
            if one.filename.startswith("/") or ".." in one.filename.split("/"):
                raise UsageError(f"files: {source}: {one.filename!r} leads out of the archive")
            if stat.S_ISLNK(one.external_attr >> 16):
                raise UsageError(f"files: {source}: {one.filename!r} is a link; put a copy there")
            made = archive.extract(one, folder)
            if mode := one.external_attr >> 16 & 0o777:
                os.chmod(made, mode | 0o700 if one.is_dir() else mode)


def _untar(source: Path, folder: Path, max_bytes: int) -> None:
    """Extract a tar archive. The filter `data` refuses devices, `..`, and links that leave the archive."""
    total = count = 0
    with tarfile.open(source, "r|*") as archive:
        for one in archive:
            total, count = total + one.size, count + 1
            if total > max_bytes or count > MAX_ENTRIES:
                raise _too_much(source, max_bytes)
            archive.extract(one, folder, filter="data")


def _made_by(script: Path) -> Path:
    """Return a folder with the files that a script creates. The script runs once per content of its text."""
    text = script.read_bytes()
    final = cache_folder() / "files" / hashlib.sha256(text).hexdigest()[:32]
    if not final.is_dir():
        with suppress(FileExistsError):  # another process was faster
            final.parent.mkdir(parents=True, exist_ok=True)
            write_directory(final, functools.partial(_run, script))
    return final


def _run(script: Path, folder: Path) -> None:
    try:
        ran = subprocess.run(  # noqa: S603  argv as a list, without a shell
            [*_SCRIPTS[script.suffix], str(script)],
            cwd=folder,
            env=clean_environment({}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SCRIPT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UsageError(f"files: {script} did not end within {_SCRIPT_SECONDS:g} s") from None
    if ran.returncode != 0:
        words = "\n".join((ran.stderr or ran.stdout).strip().splitlines()[-12:])
        raise UsageError(f"files: {script} ended with exit code {ran.returncode}:\n{words}")
