"""Runs one command confined: `python -I -S confine.py SPEC`, where SPEC is a JSON object.

    argv         the command and its arguments
    namespaces   whether to give it namespaces of its own: processes, mounts, System V objects, host name
    user         with namespaces, whether a user namespace comes first (for callers that are not root)
    network      with namespaces, false takes the network away
    root         a directory that becomes its `/`, or null
    layers       with a root: [lower, upper, work] to lay over it with overlayfs, or null for a private copy
    uid, gid     whom it runs as, or null for the caller
    cwd          its working directory, inside the root
    memory       most bytes of private memory of one process, or null
    processes    most processes and threads at a time
    disk         most bytes of one file
    hidden       with mounts, and without a root: files and folders that are empty for the command
    writable     with mounts, and without a root: the only folders that can be written to, or null for all

The environment of the command is the JSON object in BUCKEYE_CONFINED_ENV, so that no variable of a task (as
LD_PRELOAD) acts on this script, which may run as root; without that variable it is this script's own. With
namespaces this process stays as the parent of the command, which is process 1 there: when it ends, however,
the kernel ends everything inside.

The file is run as a script, without site packages, so it imports nothing of Buckeye. It ends with the code
of the command; 125 if the command could not be confined, with the reason on the last line of stderr, and
127 if it could not be run.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import resource
import signal
import socket
import stat
import struct
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

_CANNOT_CONFINE, _CANNOT_RUN = 125, 127
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 24, 38
_NEW_NS, _NEW_UTS, _NEW_IPC, _NEW_USER, _NEW_PID, _NEW_NET = (
    0x00020000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_SYS_MOUNT_SETATTR, _HERE, _RECURSIVE, _READ_ONLY = 442, -100, 0x8000, 1
_DEVICES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9)}
_OPEN_FILES = 4096
_CAPABILITIES, _CAPABILITY_VERSION_3 = 64, 0x20080522
# To own, read and write files of others, and become them; see capabilities(7).
_OF_FILES = (0, 1, 2, 3, 4, 6, 7)
_GROUP = "buckeye-session-"

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> NoReturn:
    """Confine, and become the command."""
    spec = json.loads(sys.argv[1])
    given = os.environ.get("BUCKEYE_CONFINED_ENV")
    environment = dict(os.environ) if given is None else json.loads(given)
    try:
        enter(spec)
    except OSError as error:
        sys.stderr.write(f"confine: {error}\n")
        sys.stderr.flush()
        os._exit(_CANNOT_CONFINE)
    _execute(spec, environment)


def enter(spec: dict[str, Any]) -> None:
    """Confine. Returns in the process that is to be the command; with namespaces that is a child, and this
    process waits for it and ends with its code. Raises OSError."""
    _die_with_parent()
    counted = _count_processes(spec["processes"])
    if spec["namespaces"]:
        _new_namespaces(spec)
        null = os.open(os.devnull, os.O_RDWR)  # before the root becomes the image's
        child = os.fork()
        if child != 0:
            code = _wait(child, null)
            if counted is not None:
                _leave(counted)
            os._exit(code)
        os.close(null)
        _die_with_parent()
    _prepare_root(spec)
    _become(spec, counted=counted is not None)


def _count_processes(most: int) -> str | None:
    """Go into a control group of our own that has at most so many processes; None where none can be made.
    Those that others left are removed."""
    with contextlib.suppress(OSError, StopIteration):
        above = next(_control_groups())
        for name in os.listdir(above):
            if name.startswith(_GROUP) and not os.path.exists(f"/proc/{name.removeprefix(_GROUP)}"):
                with contextlib.suppress(OSError):  # it has processes
                    os.rmdir(f"{above}/{name}")
        group = f"{above}/{_GROUP}{os.getpid()}"
        os.mkdir(group)
        try:
            _write(f"{group}/pids.max", str(most))
            _write(f"{group}/cgroup.procs", str(os.getpid()))
        except OSError:
            os.rmdir(group)
            raise
        return group
    return None


def _control_groups() -> Iterator[str]:
    """The folders of our own groups that may count processes: of version 1, then of version 2."""
    with open("/proc/self/cgroup") as file:
        lines = [line.rstrip("\n").split(":", 2) for line in file]
    for _, controllers, path in lines:
        if "pids" in controllers.split(","):
            yield f"/sys/fs/cgroup/pids{path}".rstrip("/")
    for _, controllers, path in lines:
        if controllers == "":
            yield f"/sys/fs/cgroup{path}".rstrip("/")


def _leave(group: str) -> None:
    with contextlib.suppress(OSError):
        _write(f"{os.path.dirname(group)}/cgroup.procs", str(os.getpid()))
        os.rmdir(group)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _wait(child: int, null: int) -> int:
    for descriptor in (0, 1, 2):  # the pipes are the command's: whoever reads them sees it end
        os.dup2(null, descriptor)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _new_namespaces(spec: dict[str, Any]) -> None:
    flags = _NEW_NS | _NEW_PID | _NEW_IPC | _NEW_UTS
    if not spec["network"]:
        flags |= _NEW_NET
    if spec["user"]:
        uid, gid = os.geteuid(), os.getegid()
        _unshare(_NEW_USER | flags)
        for name, line in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            _write(f"/proc/self/{name}", line)
    else:
        _unshare(flags)
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE, None)
    if not spec["network"]:
        _raise_loopback()


def _prepare_root(spec: dict[str, Any]) -> None:
    root = spec["root"]
    if root is None:
        if spec["namespaces"]:
            _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, None)
            for path in spec["hidden"]:
                _hide(path)
            if spec["writable"] is not None:
                _keep_all_else(spec["writable"])
        os.chdir(spec["cwd"])
        return
    if spec["layers"] is not None:
        lower, upper, work = spec["layers"]
        options = f"lowerdir={lower},upperdir={upper},workdir={work}"
        if spec["user"]:
            options += ",userxattr"
        _mount("overlay", root, "overlay", 0, options)
    elif spec["namespaces"]:
        _mount(root, root, None, _MS_BIND | _MS_REC, None)  # a root has to be a mount
    if spec["namespaces"]:
        _mount_system(root)
        os.chdir(root)
        _leave_old_root()
    else:
        _make_devices(root)
        os.chdir(root)
        os.chroot(".")
    try:
        os.chdir(spec["cwd"])
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        os.makedirs(spec["cwd"], exist_ok=True)  # as container engines do
        os.chdir(spec["cwd"])


def _hide(path: str) -> None:
    if os.path.isdir(path):
        _mount("tmpfs", path, "tmpfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, "mode=0,size=4k")
    elif os.path.exists(path):
        _mount(os.devnull, path, None, _MS_BIND, None)


def _keep_all_else(writable: Sequence[str]) -> None:
    """Nothing but these folders can be written to; pipes, sockets and devices work as before."""
    for path in writable:
        _mount(path, path, None, _MS_BIND | _MS_REC, None)
    _set_read_only("/", flags=_RECURSIVE, yes=True)
    for path in writable:
        _set_read_only(path, flags=_RECURSIVE, yes=False)
    if os.path.isdir("/dev/shm"):  # noqa: S108  one of its own
        _mount("tmpfs", "/dev/shm", "tmpfs", _MS_NOSUID | _MS_NODEV, "size=65536k")  # noqa: S108


def _set_read_only(path: str, *, flags: int, yes: bool) -> None:
    """mount_setattr(2), of Linux 5.12 and later, for which there is no function in older C libraries."""
    attributes = struct.pack("4Q", _READ_ONLY if yes else 0, 0 if yes else _READ_ONLY, 0, 0)
    words = (ctypes.c_long(_SYS_MOUNT_SETATTR), _HERE, os.fsencode(path), flags, attributes)
    if _libc.syscall(*words, ctypes.c_size_t(len(attributes))) != 0:
        raise _error(f"keep {path} from being written")


def _leave_old_root() -> None:
    """Make the working directory the root, and have no other: a mere chroot is left at will by whoever may
    call chroot, as root of a user namespace may."""
    if _libc.pivot_root(b".", b".") != 0:
        raise _error("pivot_root")
    if _libc.umount2(b".", _MNT_DETACH) != 0:  # the old root lies over the new one
        raise _error("unmount the old root")
    os.chdir("/")


def _mount_system(root: str) -> None:
    for name in ("proc", "dev", "tmp"):
        _real_directory(root, name)
    _mount("proc", f"{root}/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, None)
    sources = {name: os.open(f"/dev/{name}", os.O_PATH) for name in _DEVICES}
    _mount("tmpfs", f"{root}/dev", "tmpfs", _MS_NOSUID, "mode=755,size=65536k")
    for name, descriptor in sources.items():
        os.close(os.open(f"{root}/dev/{name}", os.O_CREAT | os.O_WRONLY, 0o666))
        _mount(f"/proc/self/fd/{descriptor}", f"{root}/dev/{name}", None, _MS_BIND, None)
        os.close(descriptor)
    os.mkdir(f"{root}/dev/shm", 0o1777)  # noqa: S108  a path inside of the session
    os.chmod(f"{root}/dev/shm", 0o1777)  # noqa: S103, S108  inside of the session, as on every system
    for link, target in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(target, f"{root}/dev/{link}")


def _make_devices(root: str) -> None:
    """Without namespaces nothing can be mounted; what cannot be made either is left out."""
    _real_directory(root, "dev")
    for name, (major, minor) in _DEVICES.items():
        with contextlib.suppress(FileExistsError, PermissionError):
            os.mknod(f"{root}/dev/{name}", stat.S_IFCHR | 0o666, os.makedev(major, minor))
            os.chmod(f"{root}/dev/{name}", 0o666)  # noqa: S103  inside of the session, as on every system


def _real_directory(root: str, name: str) -> None:
    """A link in the image must not lead a mount out of the root."""
    path = f"{root}/{name}"
    if os.path.islink(path):
        os.unlink(path)
    os.makedirs(path, exist_ok=True)


def _become(spec: dict[str, Any], *, counted: bool) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit(resource.RLIMIT_FSIZE, spec["disk"])
    if not counted and sys.platform == "linux":
        # of the user, in the namespace of users: of nobody else only if one was made, or the user is its own
        others = 0 if spec["user"] or spec["uid"] is not None else _processes_of(os.getuid())
        _limit(resource.RLIMIT_NPROC, others + spec["processes"])
    _limit(resource.RLIMIT_NOFILE, _OPEN_FILES)
    if spec["memory"] is not None:
        _limit(resource.RLIMIT_DATA, spec["memory"])
    if sys.platform == "linux" and _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise _error("no_new_privs")
    if spec["uid"] is not None:
        os.setgroups([])
        os.setresgid(spec["gid"], spec["gid"], spec["gid"])
        os.setresuid(spec["uid"], spec["uid"], spec["uid"])
        _die_with_parent()  # the kernel forgets it when the user changes
    if sys.platform == "linux":
        _drop_capabilities(keep=() if spec["user"] else _OF_FILES)
    os.umask(0o022)


def _drop_capabilities(keep: Sequence[int]) -> None:
    """What root may do beyond its files: mount, trace, load modules. (A normal user may none of it, but as
    root of its namespace would.) What a program that is started later would get goes first, for which a right
    is needed; where that is not held, there is nothing to drop."""
    for capability in range(_CAPABILITIES):
        if capability not in keep:
            _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    held = ctypes.create_string_buffer(24)
    if _libc.capget(header, held) != 0:
        raise _error("capabilities")
    words = list(struct.unpack("6I", held.raw))  # effective, permitted, inheritable: to 31, and from 32 on
    mask = sum(1 << capability for capability in keep)
    words = [word & mask if place < 3 else 0 for place, word in enumerate(words)]
    if _libc.capset(header, struct.pack("6I", *words)) != 0:
        raise _error("capabilities")


def _processes_of(user: int) -> int:
    count = 0
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == user:
                count += len(os.listdir(f"/proc/{name}/task"))
    return count


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _execute(spec: dict[str, Any], environment: dict[str, str]) -> NoReturn:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and its children would too
        signal.signal(number, signal.SIG_DFL)
    argv = spec["argv"]
    try:
        os.execvpe(argv[0], argv, environment)  # noqa: S606  a list of words, without a shell
    except OSError as error:
        sys.stderr.write(f"{argv[0]} cannot be run: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(_CANNOT_RUN)


def _die_with_parent() -> None:
    """Here as this file is run by itself, by an interpreter that knows nothing of Buckeye."""
    if sys.platform == "linux":
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _unshare(flags: int) -> None:
    if _libc.unshare(flags) != 0:
        raise _error("namespaces")


def _mount(source: str, target: str, kind: str | None, flags: int, options: str | None) -> None:
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    if _libc.mount(*encoded[:3], ctypes.c_ulong(flags), encoded[3]) != 0:
        raise _error(f"mount {kind or source} on {target}")


def _raise_loopback() -> None:
    """Programs expect 127.0.0.1 to be there even without a network."""
    get_flags, set_flags, up = 0x8913, 0x8914, 1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack("16sH14x", fcntl.ioctl(any_socket, get_flags, request))[1]
        fcntl.ioctl(any_socket, set_flags, struct.pack("16sH14x", b"lo", flags | up))


def _error(what: str) -> OSError:
    number = ctypes.get_errno() or errno.EPERM
    return OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
