"""Forks the sessions of a Python script, in that script's interpreter: `python server.py CONTROL SCRIPT`.

The program's own packages are those that SCRIPT imports. The modules that their source imports are imported,
where they are installed and of another distribution. The answer on the Unix socket
CONTROL is the number of modules, or the reason why sessions cannot share them. Then every message is one byte
with four descriptors: the input, output and error output of a session, and a socket. A process is forked,
which reads the session's specification from that socket and answers with its process id; its exit code
follows. What one session is given never was in the memory of this process, nor in that of another session.
Where libraries have read a variable of which the session has another value, it executes the script from the
beginning.

The specification of a session is one line, a JSON object:

    argv         the script and its arguments
    environment  all its variables
    cwd          its working directory, or null for that of this process
    confine      the specification for confine.py which has its path as `script`, or null

When CONTROL is closed this process ends, and the kernel ends the sessions that it has forked. The file is run
as a script by any Python 3.10 or newer, so it imports nothing of Buckeye and nothing that is installed.
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
    """Import, then fork; the children run the script."""
    del sys.path[0]  # the folder of this file
    control = socket.socket(fileno=int(sys.argv[1]))
    reads: dict[str, str | None] = {}
    answer = _import_shared(Path(sys.argv[2]), reads)
    control.sendall(answer.encode())
    if not answer.isdigit():
        os._exit(0)
    gc.freeze()
    _run(_fork_sessions(control), reads)


def _import_shared(script: Path, reads: dict[str, str | None]) -> str:
    """Import the libraries of all sessions, and note the variables that they read. Returns how many modules
    were imported, or why they cannot be shared."""
    own, before, files = _own_packages(script), len(sys.modules), len(os.listdir("/proc/self/fd"))
    names, seen, kind = sorted(set(_imports_of(own))), set[str](), type(os.environ)
    sysconfig.get_paths()  # reads variables of the user's, once
    os.environ.__class__ = _watched(kind, seen)
    for name in names:
        top = name.partition(".")[0]
        if top in own or f"-packages{os.sep}" not in _origin(top):
            continue
        try:
            importlib.import_module(name)
        except ImportError:
            continue  # optional, as it is for the program
        except Exception as error:  # whatever a library raises
            return f"{top}: {type(error).__name__}: {error}"
        if len(os.listdir("/proc/self/task")) > 1:
            return f"{top} starts threads when it is imported"
        if len(os.listdir("/proc/self/fd")) > files:
            return f"{top} opens files or connections when it is imported"
        if "*" in seen:
            return f"{top} reads all variables when it is imported"
    os.environ.__class__ = kind
    reads.update({key: os.environ.get(key) for key in seen})
    both = sorted(own.intersection(sys.modules))
    return f"its libraries import the program itself ({both[0]})" if both else str(len(sys.modules) - before)


def _own_packages(script: Path) -> set[str]:
    """The packages that a script imports, and the others of the same distributions."""
    tops = {name.partition(".")[0] for name in _imports_in(script)} - sys.stdlib_module_names
    owners = importlib.metadata.packages_distributions()
    own = {owner for top in tops for owner in owners.get(top, ())}
    return {*tops, *(top for top, names in owners.items() if own.intersection(names))}


def _origin(top: str) -> str:
    spec = importlib.util.find_spec(top)
    return (spec.origin or "") if spec is not None else ""


def _imports_of(own: set[str]) -> Iterator[str]:
    """The modules that the source of packages imports at the beginning of a line."""
    for source in map(Path, filter(None, map(_origin, own))):
        for file in source.parent.rglob("*.py") if source.name == "__init__.py" else [source]:
            yield from _imports_in(file)


def _imports_in(file: Path) -> list[str]:
    return _IMPORT.findall(file.read_text(encoding="utf-8", errors="replace"))


def _watched(kind: Any, names: set[str]) -> Any:
    """A class for os.environ that notes which variables are read; `*` stands for all of them."""

    class Watched(kind):  # type: ignore[misc]
        def __getitem__(self, name: str) -> Any:
            names.add(name)
            return super().__getitem__(name)

        def __iter__(self) -> Any:
            names.add("*")
            return super().__iter__()

    return Watched


def _fork_sessions(control: socket.socket) -> dict[str, Any]:
    """Fork until the socket is closed. Returns in the children, with what they are to run."""
    parent, waiting = os.getpid(), selectors.DefaultSelector()
    waiting.register(control, selectors.EVENT_READ)
    while True:
        for key, _ in waiting.select():
            if key.data is not None:
                waiting.unregister(key.fd)
                _report_end(key.fd, *key.data)
                continue
            message, files, _, _ = socket.recv_fds(control, 1, 4)
            if not message:
                os._exit(0)
            child = os.fork()
            if child == 0:
                return _begin_session(files, parent)
            waiting.register(os.pidfd_open(child), selectors.EVENT_READ, (child, files.pop()))
            for file in files:
                os.close(file)


def _report_end(ended: int, child: int, status: int) -> None:
    os.close(ended)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(OSError), socket.socket(fileno=status) as client:
        client.sendall(b"%d\n" % code)


def _begin_session(files: list[int], parent: int) -> dict[str, Any]:
    """Become a session: with its own process group and streams, and nothing of other sessions."""
    os.setsid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it has ended meanwhile
        os._exit(1)
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.closerange(4, 1 + max(map(int, os.listdir("/proc/self/fd"))))
    with socket.socket(fileno=3) as status, status.makefile("rb") as lines:
        spec: dict[str, Any] = json.loads(lines.readline())
        status.sendall(b"%d\n" % os.getpid())  # only now can the group be signalled
    for library in ("numpy.random", "torch"):  # Python seeds its own generator anew
        if library in sys.modules:
            sys.modules[library].seed()
    return spec


def _run(spec: dict[str, Any], reads: dict[str, str | None]) -> None:
    """Make this process what it would be if the script had been started in it, and run the script."""
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
