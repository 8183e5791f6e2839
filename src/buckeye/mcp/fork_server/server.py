"""Fork the sessions of a Python script, in that script's interpreter: `python server.py CONTROL SCRIPT`.

The program's own packages are those that SCRIPT imports. This process does not import them, but the modules
of other distributions that their source imports. It then writes the number of modules to the Unix socket
CONTROL, or the reason why sessions cannot share them. After that, every message is one byte with four
descriptors: stdin, stdout and stderr of a session, and a socket. For each message a process is forked. It
reads the session's specification from that socket and replies with its process id; its exit code follows.
Data of a session is never in the memory of this process or of another session. If a library has read an
environment variable that has another value in the session, the session starts a new interpreter.

The specification of a session is one line, a JSON object:

    argv         the script and its arguments
    environment  all its variables
    cwd          its working directory, or null for that of this process
    confine      the specification for confine.py, with its path as `script`, or null

When CONTROL is closed, this process ends, and the kernel kills the sessions that it has forked. Any Python
3.10 or newer runs this file as a script, so it imports only the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.metadata
import importlib.util
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
    """Import the libraries, then fork sessions. The children run the script."""
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
    """Import the libraries that all sessions share, and record the variables that they read.

    Returns the number of imported modules, or the reason why sessions cannot share them.
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
            continue  # optional for the program too
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
    """Return the packages that a script imports, and the other packages of their distributions."""
    tops = {name.partition(".")[0] for name in _file_imports(script)} - sys.stdlib_module_names
    owners = importlib.metadata.packages_distributions()
    own = {owner for top in tops for owner in owners.get(top, ())}
    return {*tops, *(top for top, names in owners.items() if own.intersection(names))}


def _origin(top: str) -> str:
    spec = importlib.util.find_spec(top)
    return (spec.origin or "") if spec is not None else ""


def _package_imports(own: set[str]) -> Iterator[str]:
    """Yield the modules that the source of packages imports at the beginning of a line."""
    for source in map(Path, filter(None, map(_origin, own))):
        for file in source.parent.rglob("*.py") if source.name == "__init__.py" else [source]:
            yield from _file_imports(file)


def _file_imports(file: Path) -> list[str]:
    return _IMPORT.findall(file.read_text(encoding="utf-8", errors="replace"))


def _watched_class(environ_class: Any, names: set[str]) -> Any:
    """Return a class for os.environ that records the names of variables that are read; `*` means all."""

    class Watched(environ_class):  # type: ignore[misc]
        def __getitem__(self, name: str) -> Any:
            names.add(name)
            return super().__getitem__(name)

        def __iter__(self) -> Any:
            names.add("*")
            return super().__iter__()

    return Watched


def _fork_sessions(control: socket.socket) -> dict[str, Any]:
    """Fork sessions until the socket is closed. Returns in each child, with its specification."""
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
    """Turn a forked process into a session with its own process group and streams.

    Descriptors of other sessions are closed.
    """
    os.setsid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # the parent ended before prctl
        os._exit(1)
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.closerange(4, 1 + max(map(int, os.listdir("/proc/self/fd"))))
    with socket.socket(fileno=3) as status, status.makefile("rb") as lines:
        spec: dict[str, Any] = json.loads(lines.readline())
        status.sendall(b"%d\n" % os.getpid())  # signals to the process group work from now on
    for library in ("numpy.random", "torch"):  # otherwise all forks share one random state
        if library in sys.modules:
            sys.modules[library].seed()
    return spec


def _run_session(spec: dict[str, Any], reads: dict[str, str | None]) -> None:
    """Set up the state that a newly started script would have, and run the script."""
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
