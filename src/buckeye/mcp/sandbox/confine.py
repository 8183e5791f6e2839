"""Run one command in a sandbox: `python -I -S confine.py SPEC`.

SPEC is a JSON object:

    argv    the command and its arguments
    bwrap   the command line of bubblewrap, which creates namespaces and mounts, or null for no namespaces
    root    a directory that becomes `/` of the command, or null
    user    the user and group id of the command, or null for the ids of the caller
    cwd     the working directory of the command, inside the root
    limits  null, or an object with `memory` (bytes of private memory of a process, or null), `processes`
            (processes and threads at a time) and `disk` (bytes of one file)
    hidden  files and folders that appear empty to the command (only used by `enter`)

BUCKEYE_CONFINED_ENV contains the environment variables of the command, as a JSON object. Therefore a variable
of a task, such as LD_PRELOAD, cannot affect this script, which may run as root. Without BUCKEYE_CONFINED_ENV,
the command inherits this script's environment.

Bubblewrap sets neither the user nor limits. With a root, this script runs a second time inside bubblewrap's
namespaces. There it calls chroot on the root, and switches to the user. The user can neither call chroot nor
create a user namespace. Without namespaces, chroot is the only isolation.

This file runs as a script without site packages, so it imports nothing of Buckeye. Its exit code is the exit
code of the command, or 125 if the sandbox failed, or 127 if the command could not start. The last line of
stderr has the reason for 125 and 127.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import resource
import signal
import stat
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

_CANNOT_CONFINE, _CANNOT_RUN = 125, 127
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _CLEAR_ALL = 1, 38, 47, 4
_NEW_NS, _NEW_UTS, _NEW_IPC, _NEW_USER, _NEW_PID = (
    0x00020000, 0x04000000, 0x08000000, 0x10000000, 0x20000000,
)  # fmt: skip
_READ_ONLY, _NOSUID_NODEV_NOEXEC, _BIND, _RECURSIVE, _PRIVATE = 1, 14, 4096, 16384, 1 << 18
_CAPABILITY_VERSION_3 = 0x20080522
_DEVICES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9)}
_OPEN_FILES = 4096
_FILE_CAPABILITIES = 0b11011111  # access to files of other users, and change of user; see capabilities(7)
_GROUP_PREFIX = "buckeye-session-"

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> NoReturn:
    """Enter the sandbox, and replace this process with the command."""
    spec = json.loads(sys.argv[1])
    encoded = os.environ.get("BUCKEYE_CONFINED_ENV")
    environment = dict(os.environ) if encoded is None else json.loads(encoded)
    try:
        _die_with_parent()
        group = _set_limits(spec)
        if group is not None:
            _continue_in_child(group)
        if spec["bwrap"] is None:
            _enter_root(spec)
            _execute(spec["argv"], environment)
        _execute_in_bubblewrap(spec, environment)
    except OSError as error:
        _exit_unconfined(error)


def enter(spec: Mapping[str, Any]) -> None:
    """Put this forked process into a sandbox, so that it keeps its imported libraries.

    Bubblewrap cannot do this, because it can only start programs. Return in the process that then runs the
    session. With namespaces, this is a child, and this process waits for the child. Exit on failure.
    """
    try:
        _die_with_parent()
        group = _set_limits(spec)
        if spec["bwrap"] is not None:
            _enter_namespaces()
        if spec["bwrap"] is not None or group is not None:
            _continue_in_child(group)
        if spec["bwrap"] is not None:
            _mount("proc", "/proc", "proc", _NOSUID_NODEV_NOEXEC)
            for path in spec["hidden"]:
                _hide(path)
        _enter_root(spec)
    except OSError as error:
        _exit_unconfined(error)


def _enter_namespaces() -> None:
    flags, uid, gid = _NEW_NS | _NEW_PID | _NEW_IPC | _NEW_UTS, os.geteuid(), os.getegid()
    if _libc.unshare(flags | (0 if uid == 0 else _NEW_USER)) != 0:
        raise _last_error("cannot create namespaces")
    if uid != 0:
        for name, line in (
            ("setgroups", "deny"),
            ("uid_map", f"{uid} {uid} 1"),
            ("gid_map", f"{gid} {gid} 1"),
        ):
            _write(f"/proc/self/{name}", line)
    _mount("none", "/", None, _RECURSIVE | _PRIVATE)


def _hide(path: str) -> None:
    if os.path.isdir(path):
        _mount("tmpfs", path, "tmpfs", _NOSUID_NODEV_NOEXEC | _READ_ONLY)
    else:
        _mount(os.devnull, path, None, _BIND)


def _mount(source: str, target: str, kind: str | None, flags: int) -> None:
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    if _libc.mount(*encoded, ctypes.c_ulong(flags), None) != 0:
        raise _last_error(f"cannot mount {kind or source} on {target}")


def _exit_unconfined(error: OSError) -> NoReturn:
    sys.stderr.write(f"confine: {error}\n")
    sys.stderr.flush()
    os._exit(_CANNOT_CONFINE)


def _execute_in_bubblewrap(spec: Mapping[str, Any], environment: Mapping[str, str]) -> NoReturn:
    """Replace this process with bubblewrap. Pass the variables of the command in a memory file.

    Other users cannot read this file, and the variables do not affect bubblewrap itself.
    """
    argv = spec["argv"]
    if spec["root"] is not None:
        inside = {**spec, "bwrap": None, "limits": None}
        argv = [sys.executable, "-I", "-S", os.path.abspath(__file__), json.dumps(inside)]
        environment = {"BUCKEYE_CONFINED_ENV": json.dumps(environment)}
    elif not _is_executable(argv[0], environment):
        _exit_not_run(argv[0], os.strerror(errno.ENOENT))
    arguments = [part for name, value in environment.items() for part in ("--setenv", name, value)]
    options = os.memfd_create("options")
    os.write(options, b"".join(os.fsencode(argument) + b"\0" for argument in arguments))
    os.lseek(options, 0, os.SEEK_SET)
    os.set_inheritable(options, True)
    _execute([*spec["bwrap"], "--args", str(options), "--", *argv], {})


def _is_executable(program: str, environment: Mapping[str, str]) -> bool:
    folders = [""] if "/" in program else os.get_exec_path(environment)
    return any(os.access(os.path.join(folder, program), os.X_OK) for folder in folders)


def _set_limits(spec: Mapping[str, Any]) -> str | None:
    """Set the limits. Return the control group that limits processes, or None if it cannot be created."""
    limits = spec["limits"]
    if limits is None:
        return None
    group = _enter_group(limits["processes"])
    _set_limit(resource.RLIMIT_CORE, 0)
    _set_limit(resource.RLIMIT_FSIZE, limits["disk"])
    _set_limit(resource.RLIMIT_NOFILE, _OPEN_FILES)
    if limits["memory"] is not None:
        _set_limit(resource.RLIMIT_DATA, limits["memory"])
    if group is None:
        user = os.getuid() if spec["user"] is None else spec["user"]
        _set_limit(resource.RLIMIT_NPROC, _count_processes(user) + limits["processes"])
    return group


def _set_limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _count_processes(user: int) -> int:
    count = 0
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == user:
                count += len(os.listdir(f"/proc/{name}/task"))
    return count


def _enter_group(max_processes: int) -> str | None:
    """Enter a new control group with a process limit, and return its path. Return None if this fails.

    The kernel's limit per user does not apply to root. Also remove the groups of killed sessions.
    """
    with contextlib.suppress(OSError, StopIteration):
        parent = next(_control_groups())
        for name in os.listdir(parent):
            pid = name.removeprefix(_GROUP_PREFIX)
            if name.startswith(_GROUP_PREFIX) and not os.path.exists(f"/proc/{pid}"):
                with contextlib.suppress(OSError):  # the group still has processes
                    os.rmdir(f"{parent}/{name}")
        group = f"{parent}/{_GROUP_PREFIX}{os.getpid()}"
        os.mkdir(group)
        try:
            _write(f"{group}/pids.max", str(max_processes))
            _write(f"{group}/cgroup.procs", str(os.getpid()))
        except OSError:
            os.rmdir(group)
            raise
        return group
    return None


def _control_groups() -> Iterator[str]:
    """Yield the paths of this process's control groups that can limit processes, version 1 before 2."""
    with open("/proc/self/cgroup") as file:
        lines = [line.rstrip("\n").split(":", 2) for line in file]
    for _, controllers, path in lines:
        if "pids" in controllers.split(","):
            yield f"/sys/fs/cgroup/pids{path}".rstrip("/")
    for _, controllers, path in lines:
        if controllers == "":
            yield f"/sys/fs/cgroup{path}".rstrip("/")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _continue_in_child(group: str | None) -> None:
    """Fork, and return in the child. The parent waits for the child, and exits with its exit code.

    The parent also removes the control group `group`.
    """
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    child = os.fork()
    if child == 0:
        os.close(null)
        _die_with_parent()
        return
    for descriptor in (0, 1, 2):  # close the pipes here, so that they end with the command
        os.dup2(null, descriptor)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if group is not None:
        _remove_group(group)
    os._exit(code if code >= 0 else 128 - code)


def _remove_group(group: str) -> None:
    with contextlib.suppress(OSError):
        _write(f"{os.path.dirname(group)}/cgroup.procs", str(os.getpid()))
    for _ in range(100):  # the kernel may still be ending processes in the namespaces
        try:
            os.rmdir(group)
        except OSError as error:
            if error.errno != errno.EBUSY:
                return
            time.sleep(0.01)
        else:
            return


def _enter_root(spec: Mapping[str, Any]) -> None:
    """Enter the root, switch to the user, and drop capabilities. Root keeps the capabilities for files."""
    if spec["root"] is not None:
        if spec["limits"] is not None:  # no bubblewrap, which would have mounted the devices
            _make_devices(spec["root"])
        os.chdir(spec["root"])
        os.chroot(".")
    if spec["user"] is not None:
        os.setgroups([])
        os.setresgid(spec["user"], spec["user"], spec["user"])
        os.setresuid(spec["user"], spec["user"], spec["user"])
        _die_with_parent()  # the kernel clears this setting when the user changes
    _drop_capabilities(_FILE_CAPABILITIES if os.geteuid() == 0 else 0)
    os.umask(0o022)
    try:
        os.chdir(spec["cwd"])
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        if spec["root"] is None:
            raise
        os.makedirs(spec["cwd"], exist_ok=True)  # as container engines do
        os.chdir(spec["cwd"])


def _make_devices(root: str) -> None:
    """Create device files. Skip devices that this user cannot create."""
    for name, (major, minor) in _DEVICES.items():
        with contextlib.suppress(FileExistsError, PermissionError):
            os.mknod(f"{root}/dev/{name}", stat.S_IFCHR | 0o666, os.makedev(major, minor))
            os.chmod(f"{root}/dev/{name}", 0o666)  # noqa: S103  inside the session, as on every system


def _drop_capabilities(keep: int) -> None:
    """Drop all capabilities except `keep`, and set no_new_privs, so that no program can regain them."""
    header, held = struct.pack("Ii", _CAPABILITY_VERSION_3, 0), ctypes.create_string_buffer(24)
    failed = _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or _libc.capget(header, held)
    if failed:
        raise _last_error("cannot read capabilities")
    _libc.prctl(_PR_CAP_AMBIENT, _CLEAR_ALL, 0, 0, 0)
    words = struct.unpack("6I", held.raw)  # effective, permitted, inheritable: bits 0-31, then bits 32-63
    if _libc.capset(header, struct.pack("6I", *(word & keep for word in words[:3]), 0, 0, 0)) != 0:
        raise _last_error("cannot drop capabilities")


def _execute(argv: list[str], environment: Mapping[str, str]) -> NoReturn:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores both, and the command would too
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(argv[0], argv, environment)  # noqa: S606  argv as a list, without a shell
    except OSError as error:
        _exit_not_run(argv[0], str(error.strerror))


def _exit_not_run(program: str, reason: str) -> NoReturn:
    sys.stderr.write(f"cannot run {program}: {reason}\n")
    sys.stderr.flush()
    os._exit(_CANNOT_RUN)


def _die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends.

    This is a copy, because an interpreter without Buckeye runs this file.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _last_error(failed: str) -> OSError:
    number = ctypes.get_errno() or errno.EPERM
    return OSError(number, f"{failed}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
