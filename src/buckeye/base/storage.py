"""Write files and directories atomically: readers see the old content or the new content.

A file or directory is written under the temporary name `.<name>.tmp-<pid>-<host>` in the target folder,
synced to disk, and renamed. If the process is killed, the temporary file remains. The next process on the
host that writes to the folder deletes it. Temporary files of other hosts remain, because their processes may
still be alive.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import stat
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from buckeye.base.faults import fault_point
from buckeye.base.foreign_files import read_regular
from buckeye.errors import RunError

_TEMPORARY = re.compile(r"^\..+\.tmp-(\d+)(?:-([0-9a-f]{8}))?$", re.DOTALL)
_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")
_HASH_THREADS = 8
_DEVICE_FOLDERS = (Path("/dev"), Path("/dev/fd"), Path("/proc/self/fd"))
_CHECK_SECONDS = 0.2  # longer than `is_locked` holds a lock
_STEP = re.compile(r"^step_(0|[1-9]\d*)$")


def write_directory(
    final: Path, fill: Callable[[Path], None], *, replace: bool = False, durable: bool = True
) -> None:
    """Create the directory `final` atomically, with the content written by `fill(directory)`.

    If `final` exists, replace it if `replace` is set, else raise `FileExistsError`. If `fill` raises, no file
    and no new parent directory remains. Permissions follow the umask of the user. Without `durable`, a crash
    of the machine may damage the content.
    """
    with _new_parents(final):
        _remove_leftovers(final.parent)
        if final.exists() and not replace:
            raise FileExistsError(errno.EEXIST, "directory exists already", str(final))
        temporary = _temporary_path(final)
        _remove(temporary)
        temporary.mkdir()
        _fill_and_move(temporary, final, fill, durable=durable)


def _fill_and_move(temporary: Path, final: Path, fill: Callable[[Path], None], *, durable: bool) -> None:
    try:
        fill(temporary)
        fault_point("storage.temporary_written")
        _apply_umask(temporary)
        if durable:
            sync_tree(temporary)
        fault_point("storage.before_rename")
        _move_into_place(temporary, final)
        fault_point("storage.after_rename")
        sync(final.parent)
    finally:
        _remove(temporary)  # after `_exchange`, the temporary name belongs to the old directory


@contextmanager
def _new_parents(path: Path) -> Iterator[None]:
    """Create the missing parent directories of a path; remove them if the block raises."""
    missing = [folder for folder in path.parents if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with suppress(OSError):  # another process uses the directory
            for folder in missing:
                folder.rmdir()
        raise


def write_file(path: Path, data: bytes | str | Sequence[bytes], *, mode: int = 0o666) -> None:
    """Create or replace the file `path` atomically. `data` may be in parts.

    Text is encoded by `utf8`. `mode` has the permissions of the new file, reduced by the umask of the user.
    """
    data = utf8(data) if isinstance(data, str) else data
    parts = [data] if isinstance(data, bytes) else data
    if _is_device(path):
        return _write_device(path, parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(path.parent)
    temporary = _temporary_path(path)
    try:
        with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.writelines(parts)
            file.flush()
            fault_point("storage.temporary_written")
            os.fsync(file.fileno())
        fault_point("storage.before_rename")
        temporary.replace(path)
        fault_point("storage.after_rename")
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _is_device(path: Path) -> bool:
    """Return True for a pipe, a device, and a link such as /dev/stdout: they must not be replaced."""
    if not path.exists() or path.is_dir():
        return False
    return not path.is_file() or path.absolute().parent in _DEVICE_FOLDERS


def _write_device(path: Path, parts: Sequence[bytes]) -> None:
    """Write to a pipe or a device. Raise `OSError` for a pipe that no process reads."""
    with open(path, "ab", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as device:
        os.set_blocking(device.fileno(), True)
        device.writelines(parts)


def write_link(path: Path, target: str) -> None:
    """Create or replace a symbolic link atomically."""
    if path.is_symlink() and os.readlink(path) == target:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary_path(path)
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(path)


def utf8(text: str) -> bytes:
    """Encode a text as UTF-8.

    JSON texts may contain half a surrogate pair, which UTF-8 cannot encode. It becomes U+FFFD. Two matching
    halves become their character.
    """
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()


def well_formed(value: Any) -> Any:
    """Return a JSON value in which UTF-8 can encode every text."""
    return change_texts(value, lambda text: utf8(text).decode())


def parse_json(text: str) -> Any:
    """Return the value of a JSON text. UTF-8 can encode all its texts. Raise `ValueError` for other input."""
    value = json.loads(text)
    return well_formed(value) if _HALF_PAIR.search(text) else value


def change_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value in which `change(text)` replaces every text, including the keys of objects."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [change_texts(item, change) for item in value]
    if isinstance(value, dict):
        return {change(key): change_texts(item, change) for key, item in value.items()}
    return value


def remove_directory(path: Path) -> None:
    """Delete a directory, if it exists. Readers see all of the directory or none of it."""
    hidden = _temporary_path(path.with_name(f"{path.name}.removed"))
    _remove(hidden)
    try:
        path.rename(hidden)
    except FileNotFoundError:
        return
    _remove(hidden)


def link_or_copy(source: str, target: str) -> None:
    """Make a hard link to a file, or a copy if a link is not possible.

    Use it only for files that are not modified later, because a hard link shares its content.
    """
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of the content of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_files(paths: Sequence[Path]) -> list[str]:
    """Return the SHA-256 of each file. Threads compute them in parallel, because models are large."""
    with ThreadPoolExecutor(min(_HASH_THREADS, len(paths)) or 1, "sha256") as threads:
        return list(threads.map(sha256_file, paths))


def private_folder(name: str) -> Path:
    """Return a folder that only this user can read, for files that are needed while a process runs.

    The folder is in XDG_RUNTIME_DIR if this is writable, and otherwise in the temporary directory. Raise
    `RunError` if the folder cannot be created, or if another user owns its path.
    """
    # after `su` or in a container, XDG_RUNTIME_DIR may not exist, or may belong to another user
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    is_usable = runtime and os.path.isdir(runtime) and os.access(runtime, os.W_OK)
    base = Path(runtime or "") if is_usable else Path(tempfile.gettempdir(), f"buckeye-{os.getuid()}")
    folder = base / (f"buckeye-{name}" if is_usable else name)
    code, hint = "BK-FILE-PERMISSION", "set XDG_RUNTIME_DIR to a directory that only you can use"
    for path in (folder,) if is_usable else (base, folder):
        try:
            path.mkdir(mode=0o700, exist_ok=True)
            status = path.lstat()
        except OSError as error:
            raise RunError(f"cannot create the folder {path}: {error}", code=code, hint=hint) from None
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            message = f"{path} belongs to another user, or is not a folder"
            raise RunError(message, code=code, hint=hint)
        if status.st_mode & 0o077:
            path.chmod(0o700)
    return folder


def sync_tree(directory: Path) -> None:
    """Wait until all files in a directory and its subdirectories are on disk."""
    for folder, _, names in os.walk(directory, topdown=False):
        for name in names:
            sync(Path(folder, name))
        sync(Path(folder))


def try_lock(path: Path) -> int | None:
    """Lock a file exclusively, and return its descriptor, or None if another process holds a lock.

    The lock ends when the descriptor is closed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        lock_file(handle)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle


def lock_file(handle: int) -> None:
    """Lock an open file exclusively. Raise `BlockingIOError` if another process holds a lock.

    `is_locked` in another process also holds a lock, but only for a moment.
    """
    deadline = time.monotonic() + _CHECK_SECONDS
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(_CHECK_SECONDS / 20)


def is_locked(path: Path) -> bool:
    """Return True if a process holds an exclusive lock (flock) on a file or directory.

    Return False if the file cannot be opened, or if the file system has no locks.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared, so that checks do not conflict
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False


def read_json(path: Path) -> Any:
    """Return the JSON value in a file.

    Raise `OSError` if the file cannot be read. Raise `ValueError` if it is not JSON, not a regular file, too
    large, or nested too deeply.
    """
    try:
        return parse_json(read_regular(path).decode())
    except RecursionError:
        raise ValueError("lists or tables are nested too deeply") from None


def step_directory(root: Path, step: int) -> Path:
    """Return the path `<root>/step_<step>`."""
    return root / f"step_{step}"


def step_directories(root: Path) -> dict[int, Path]:
    """Return the directories `step_<N>` under `root` by step, in ascending order.

    Returns {} if `root` does not exist.
    """
    if not root.is_dir():
        return {}
    steps = {int(match[1]): path for path in root.iterdir() if (match := _STEP.match(path.name))}
    return dict(sorted(steps.items()))


def find_leftovers(folder: Path) -> list[Path]:
    """Return the temporary files that killed processes of this host left in a folder."""
    return [
        path
        for path in folder.iterdir()
        if (match := _TEMPORARY.match(path.name))
        and match[2] in (None, _host_id())
        and not psutil.pid_exists(int(match[1]))
    ]


def sync(path: Path) -> None:
    """Wait until the content of a file, or the list of names in a folder, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _apply_umask(directory: Path) -> None:
    """Give the files of a directory the permissions of the user's umask, because some libraries ignore it."""
    granted = directory.stat().st_mode & 0o666
    for folder, _, names in os.walk(directory):
        for path in (Path(folder, name) for name in names):
            status = path.lstat()
            # a file with several hard links may also belong to another directory
            is_own = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
            if is_own and status.st_mode & granted != granted:
                path.chmod(stat.S_IMODE(status.st_mode) | granted)


def _temporary_path(final: Path) -> Path:
    return final.with_name(f".{final.name}.tmp-{os.getpid()}-{_host_id()}")


def _host_id() -> str:
    """Return eight hexadecimal digits that identify this host."""
    return f"{zlib.crc32(socket.gethostname().encode()):08x}"


def _remove_leftovers(folder: Path) -> None:
    for path in find_leftovers(folder):
        _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _move_into_place(temporary: Path, final: Path) -> None:
    if not final.exists():
        temporary.rename(final)
    elif not _exchange(temporary, final):
        # The file system cannot exchange two names, so `final` does not exist between these two calls.
        remove_directory(final)
        temporary.rename(final)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange the names of two paths atomically. Return False if the file system cannot exchange names."""
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "renameat2"):  # a C library other than glibc
        return False
    at_fdcwd, rename_exchange = -100, 2
    if library.renameat2(at_fdcwd, os.fsencode(first), at_fdcwd, os.fsencode(second), rename_exchange) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(second))
