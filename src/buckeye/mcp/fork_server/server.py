"""Fork the sessions of a Python script, in that script's interpreter: `python server.py CONTROL SCRIPT`.

The script's own packages are the packages that SCRIPT imports. This process does not import the own packages.
It imports the libraries that the source of the own packages imports. Then this process writes the number of
imported modules to the Unix socket CONTROL, or the reason why sessions cannot share the libraries.

Each request on CONTROL is one byte with four file descriptors: stdin, stdout and stderr of a session, and a
status socket. For each request, this process forks a child. The child reads the session's specification from
the status socket, replies with its process id, and runs the script. At its end, this process writes its exit
code to the status socket. The memory of this process never contains data of a session. If a library has read
an environment variable that has another value in the session, the child starts a new interpreter instead.

The specification of a session is one line with a JSON object:

    argv         the script and its arguments
    environment  all environment variables of the session
    cwd          the working directory of the session, or null for the directory of this process
    confine      the specification for confine.py, plus the path of confine.py as `script`, or null

When the other end closes CONTROL, this process exits, and the kernel kills the sessions. Any Python from 3.10
can run this file as a script, so this file imports only the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.metadata
import importlib.util
import io
import json
import os
import re
import runpy
import selectors
import signal
import socket
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_IMPORT = re.compile(r"^(?:from|import) (\w[\w.]*)", re.MULTILINE)


def main() -> None:
    """Import the libraries, and fork sessions. Each child returns from the loop and runs the script."""
    del sys.path[0]  # remove the folder of this file
    control = socket.socket(fileno=int(sys.argv[1]))
    reads: dict[str, str | None] = {}
    reply = _import_shared(Path(sys.argv[2]), reads)
    control.sendall(reply.encode())
    if not reply.isdigit():
        os._exit(0)
    gc.freeze()
    _run_session(_fork_sessions(control), reads)


def _import_shared(script: Path, reads: dict[str, str | None]) -> str:
    """Import the libraries that all sessions share. Fill `reads` with the variables that the libraries read.

    Return the number of imported modules, or the reason why sessions cannot share the libraries.
    """
    own, module_count, file_count = _own_packages(script), len(sys.modules), len(os.listdir("/proc/self/fd"))
    names, variables, environ_class = sorted(set(_package_imports(own))), set[str](), type(os.environ)
    sysconfig.get_paths()  # reads some of the user's variables once
    os.environ.__class__ = _watched_class(environ_class, variables)
    for name in names:
        top = name.partition(".")[0]
        if top in own or f"-packages{os.sep}" not in _origin(top):
            continue
        try:
            importlib.import_module(name)
        except ImportError:
            continue  # the script can probably run without this module
        except Exception as error:  # any error of a library
            return f"{top}: {type(error).__name__}: {error}"
        if len(os.listdir("/proc/self/task")) > 1:
            return f"importing {top} starts threads"
        if len(os.listdir("/proc/self/fd")) > file_count:
            return f"importing {top} opens files or connections"
        if "*" in variables:
            return f"importing {top} reads all variables"
    os.environ.__class__ = environ_class
    reads.update({name: os.environ.get(name) for name in variables})
    if own_modules := sorted(own.intersection(sys.modules)):
        return f"the libraries import the program itself ({own_modules[0]})"
    return str(len(sys.modules) - module_count)


def _own_packages(script: Path) -> set[str]:
    """Return the packages that a script imports, and all packages of the same distributions."""
    tops = {name.partition(".")[0] for name in _file_imports(script)} - sys.stdlib_module_names
    owners = importlib.metadata.packages_distributions()
    own = {owner for top in tops for owner in owners.get(top, ())}
    return {*tops, *(top for top, names in owners.items() if own.intersection(names))}


def _origin(top: str) -> str:
    spec = importlib.util.find_spec(top)
    return (spec.origin or "") if spec is not None else ""


def _package_imports(own: set[str]) -> Iterator[str]:
    """Yield the modules that the source files of the packages import outside functions."""
    for source in map(Path, filter(None, map(_origin, own))):
        for file in source.parent.rglob("*.py") if source.name == "__init__.py" else [source]:
            yield from _file_imports(file)


def _file_imports(file: Path) -> list[str]:
    return _IMPORT.findall(file.read_text(encoding="utf-8", errors="replace"))


def _watched_class(environ_class: Any, names: set[str]) -> Any:
    """Return a class for `os.environ` that adds each variable that is read to `names`, or `*` for all."""

    class Watched(environ_class):  # type: ignore[misc]
        def __getitem__(self, name: str) -> Any:
            names.add(name)
            return super().__getitem__(name)

        def __iter__(self) -> Any:
            names.add("*")
            return super().__iter__()

    return Watched


def _fork_sessions(control: socket.socket) -> dict[str, Any]:
    """Fork a child for each request until the socket is closed. Only return in a child, with its spec."""
    parent, selector = os.getpid(), selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.data is not None:
                selector.unregister(key.fd)
                _report_exit(key.fd, *key.data)
                continue
            message, files, _, _ = socket.recv_fds(control, 1, 4)
            if not message:
                os._exit(0)
            child = os.fork()
            if child == 0:
                # otherwise the next garbage collection closes their numbers, which are other files then
                selector.close()
                control.detach()
                return _begin_session(files, parent)
            selector.register(os.pidfd_open(child), selectors.EVENT_READ, (child, files.pop()))
            for file in files:
                os.close(file)


def _report_exit(pidfd: int, child: int, status: int) -> None:
    os.close(pidfd)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(OSError), socket.socket(fileno=status) as client:
        client.sendall(b"%d\n" % code)


def _begin_session(files: list[int], parent: int) -> dict[str, Any]:
    """Turn a forked process into a session with its own process group and streams. Return its spec.

    Close the file descriptors of other sessions.
    """
    os.setsid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # the parent ended before prctl
        os._exit(1)
    for number, file in enumerate(files):
        os.dup2(file, number)
    _reopen_streams()
    os.closerange(4, 1 + max(map(int, os.listdir("/proc/self/fd"))))
    with socket.socket(fileno=3) as status, status.makefile("rb") as lines:
        spec: dict[str, Any] = json.loads(lines.readline())
        # after `setsid`, so that the receiver can signal the process group
        status.sendall(b"%d\n" % os.getpid())
    for library in ("numpy.random", "torch"):  # otherwise all sessions draw the same random numbers
        if library in sys.modules:
            sys.modules[library].seed()
    return spec


def _reopen_streams() -> None:
    """Replace `sys.stdin`, `stdout` and `stderr`, which remember if the files before them were seekable."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old: Any = getattr(sys, name)
        new = io.TextIOWrapper(
            open(number, "wb" if number else "rb", closefd=False),  # noqa: SIM115  open as long as the process
            encoding=old.encoding,
            errors=old.errors,
            newline="\n",
            line_buffering=name == "stderr",
            write_through=old.write_through,
        )
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)


def _run_session(spec: dict[str, Any], reads: dict[str, str | None]) -> None:
    """Set up the process as if the script had just started, and run the script."""
    if spec["confine"] is not None:
        runpy.run_path(spec["confine"]["script"])["enter"](spec["confine"])
    elif spec["cwd"] is not None:
        os.chdir(spec["cwd"])
    environment, path = spec["environment"], spec["argv"][0]
    if any(environment.get(key) != value for key, value in reads.items()):
        os.execve(path, spec["argv"], environment)  # noqa: S606  without a shell
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    if "tempfile" in sys.modules:
        sys.modules["tempfile"].tempdir = None  # type: ignore[attr-defined]
    importlib.invalidate_caches()
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    sys.argv[:] = spec["argv"]
    runpy.run_path(path, run_name="__main__")


if __name__ == "__main__":
    main()
