"""Files that are either there and whole, or not there.

Everything is written under a temporary sibling name `.<name>.tmp-<pid>-<host>`, flushed to the disk, and
renamed. A process killed between any two instructions therefore leaves the old state or the new one; what it
leaves behind under the temporary name is removed by the next writer in the same folder on the same host: of
processes elsewhere nobody knows whether they live.
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
import sys
import tempfile
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from buckeye.base.faults import fault_point
from buckeye.base.foreign_files import read_regular
from buckeye.errors import RunError

_TEMPORARY = re.compile(r"^\..+\.tmp-(\d+)(?:-([0-9a-f]{8}))?$", re.DOTALL)
_HASHED_AT_ONCE = 8
_OF_YOUR_OWN = "XDG_RUNTIME_DIR to a directory of your own"
_STEP = re.compile(r"^step_(0|[1-9]\d*)$")


def write_directory(
    final: Path, fill: Callable[[Path], None], *, replace: bool = False, durable: bool = True
) -> None:
    """Create the directory `final` with whatever `fill(directory)` puts into it, in one step.

    With `replace` an existing `final` is exchanged for the new one; without it, it raises `FileExistsError`.
    If `fill` raises, nothing remains. Files may be read and written by whom the user's umask lets. What is
    not `durable` may be damaged after the machine, not only a process, has failed.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(final.parent)
    if final.exists() and not replace:
        raise FileExistsError(errno.EEXIST, "directory exists already", str(final))
    temporary = _temporary(final)
    _remove(temporary)
    temporary.mkdir()
    try:
        fill(temporary)
        fault_point("storage.temporary_written")
        _open_to_those_of(temporary)
        if durable:
            sync_tree(temporary)
        fault_point("storage.before_rename")
        _move_into_place(temporary, final)
        fault_point("storage.after_rename")
        sync(final.parent)
    finally:
        _remove(temporary)  # after an exchange this is the old directory


def write_file(path: Path, data: bytes | str, *, mode: int = 0o666) -> None:
    """Create or replace the file `path` in one step. Text is written by `utf8`. `mode` are the rights of the
    new file, of which the user's umask takes some away."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(path.parent)
    temporary = _temporary(path)
    try:
        with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(utf8(data) if isinstance(data, str) else data)
            file.flush()
            fault_point("storage.temporary_written")
            os.fsync(file.fileno())
        fault_point("storage.before_rename")
        temporary.replace(path)
        fault_point("storage.after_rename")
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def utf8(text: str) -> bytes:
    """A text as UTF-8. Half a surrogate pair, which a model's server or an environment may send as JSON and
    UTF-8 cannot hold, becomes U+FFFD; two halves that belong together become their character."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()


def well_formed(value: Any) -> Any:
    """A JSON value whose texts are as `utf8` would write them."""
    if isinstance(value, str):
        return utf8(value).decode()
    if isinstance(value, list):
        return [well_formed(item) for item in value]
    if isinstance(value, dict):
        return {well_formed(key): well_formed(item) for key, item in value.items()}
    return value


def remove_directory(path: Path) -> None:
    """Delete a directory so that a reader sees all of it or none of it. A missing one is fine."""
    unseen = _temporary(path.with_name(f"{path.name}.removed"))
    _remove(unseen)
    try:
        path.rename(unseen)
    except FileNotFoundError:
        return
    _remove(unseen)


def link_or_copy(source: str, target: str) -> None:
    """Give a file that nobody writes to again a second name."""
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)


def sha256_file(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_files(paths: Sequence[Path]) -> list[str]:
    """The SHA-256 of each file, computed side by side: of a model of many gigabytes it takes seconds."""
    with ThreadPoolExecutor(min(_HASHED_AT_ONCE, len(paths)) or 1, "sha256") as threads:
        return list(threads.map(sha256_file, paths))


def private_folder(name: str) -> Path:
    """A folder of this user, for what lives as long as a process: in XDG_RUNTIME_DIR where that can be used,
    else among the temporary ones. Nobody else may look into it. Raises RunError if it cannot be made, or
    somebody else has put something in its place."""
    runtime = os.environ.get(
        "XDG_RUNTIME_DIR"
    )  # `su` and containers leave one that is not there, or not ours
    usable = runtime and os.path.isdir(runtime) and os.access(runtime, os.W_OK)
    base = Path(runtime or "") if usable else Path(tempfile.gettempdir(), f"buckeye-{os.getuid()}")
    folder = base / (f"buckeye-{name}" if usable else name)
    for one in (folder,) if usable else (base, folder):
        try:
            one.mkdir(mode=0o700, exist_ok=True)
            seen = one.lstat()
        except OSError as error:
            raise RunError(f"{one} cannot be made ({error}). Set {_OF_YOUR_OWN}.") from None
        if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.getuid():
            raise RunError(f"{one} belongs to another user, or is no folder. Set {_OF_YOUR_OWN}.")
        if seen.st_mode & 0o077:
            one.chmod(0o700)
    return folder


def sync_tree(directory: Path) -> None:
    """Flush what is in a directory to the disk."""
    for folder, _, names in os.walk(directory, topdown=False):
        for name in names:
            sync(Path(folder, name))
        sync(Path(folder))


def is_locked(path: Path) -> bool:
    """Whether a process holds a file or directory under an exclusive lock (flock) now; not if it cannot be
    opened, or where files cannot be locked."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)  # those who look do not meet
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False


def read_json(path: Path) -> Any:
    """The JSON value in a file. Raises `OSError`, or `ValueError` for what is none, for a pipe or a device,
    and for what is so large or nested so deeply that nobody could walk it."""
    try:
        return json.loads(read_regular(path).decode())
    except RecursionError:
        raise ValueError("its lists or tables are nested too deeply") from None


def step_directory(root: Path, step: int) -> Path:
    """`<root>/step_<step>`."""
    return root / f"step_{step}"


def step_directories(root: Path) -> dict[int, Path]:
    """Step -> directory for every `step_<N>` under `root`, in ascending order; empty without a root."""
    if not root.is_dir():
        return {}
    found = {int(match[1]): path for path in root.iterdir() if (match := _STEP.match(path.name))}
    return dict(sorted(found.items()))


def _open_to_those_of(directory: Path) -> None:
    """Let those read and write the files in a directory whom the user's umask lets, as a new directory shows:
    some libraries make all files private."""
    granted = directory.stat().st_mode & 0o666
    for folder, _, names in os.walk(directory):
        for path in (Path(folder, name) for name in names):
            seen = path.lstat()
            own = stat.S_ISREG(seen.st_mode) and seen.st_nlink == 1  # others are files of somebody else too
            if own and seen.st_mode & granted != granted:
                path.chmod(stat.S_IMODE(seen.st_mode) | granted)


def _temporary(final: Path) -> Path:
    return final.with_name(f".{final.name}.tmp-{os.getpid()}-{_this_host()}")


def _this_host() -> str:
    """Eight hexadecimal digits for the name of this host."""
    return f"{zlib.crc32(socket.gethostname().encode()):08x}"


def leftovers(folder: Path) -> list[Path]:
    """What writers of this host that were killed have left in a folder, under temporary names."""
    return [
        path
        for path in folder.iterdir()
        if (match := _TEMPORARY.match(path.name))
        and match[2] in (None, _this_host())
        and not psutil.pid_exists(int(match[1]))
    ]


def _remove_leftovers(folder: Path) -> None:
    for path in leftovers(folder):
        _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until what is in a file, or which names are in a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _move_into_place(temporary: Path, final: Path) -> None:
    if not final.exists():
        temporary.rename(final)
    elif not _exchange(temporary, final):
        # Neither the kernel nor the file system can exchange two names: the old state is briefly gone.
        remove_directory(final)
        temporary.rename(final)


def _exchange(one: Path, other: Path) -> bool:
    """Swap what two names stand for, in one step; False where the system cannot."""
    library = ctypes.CDLL(None, use_errno=True)
    if sys.platform == "darwin":
        rename_swap = 2
        result = library.renamex_np(os.fsencode(one), os.fsencode(other), rename_swap)
    elif hasattr(library, "renameat2"):
        at_fdcwd, rename_exchange = -100, 2
        result = library.renameat2(at_fdcwd, os.fsencode(one), at_fdcwd, os.fsencode(other), rename_exchange)
    else:
        return False
    if result == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(other))
