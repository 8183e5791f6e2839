"""Runs a Python program for sessions, in that program's interpreter: `python [flags] server.py WORK FD`.

WORK is `learn` or `serve`. With `learn` FD is a file with the specification of a session; the program is run
as without this script, and the names of the modules that it looks for are written to the file `learn` of the
specification. With `serve` FD is a Unix socket. Its first message, one line of JSON, says what to import; the
answer, one line, whether that went well. Then every message is one byte with five descriptors: the input,
output and error output of a session, the end of a pipe to which its process id and its exit code are written,
and its specification. A process is forked for it, and it reads the specification: what one session is given
never was in the memory of this process, nor in that of another session.

The specification is a JSON object:

    target       ["module", NAME] or ["file", PATH]
    arguments    those of the program
    environment  all its variables
    cwd          its working directory, or null for that of this process
    confine      the specification for confine.py and its path as `script`, or null
    learn        a descriptor, with `learn`

When the socket is closed this process ends, and the kernel ends the sessions that it has forked. The file is
run as a script by any Python 3.9 or newer, so it imports nothing of Buckeye and nothing that is installed.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import runpy
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

_PR_SET_PDEATHSIG = 1
_CANNOT_CONFINE = 125


def main() -> dict[str, Any]:
    """Learn, or serve. Returns the specification of the session that this process is to run."""
    if not _path_is_safe():
        del sys.path[0]  # the folder of this file
    work, number = sys.argv[1], int(sys.argv[2])
    if work == "serve":
        return _serve(socket.socket(fileno=number))
    spec = _read_spec(number)
    sys.meta_path.insert(0, _Recorder(spec["learn"]))
    return spec


def prepare(spec: dict[str, Any]) -> tuple[str, str]:
    """Make this process what it would be if the program had been started in it. Returns the target."""
    if spec["confine"] is not None:
        _confine(spec["confine"])
    elif spec["cwd"] is not None:
        os.chdir(spec["cwd"])
    os.environ.clear()
    os.environ.update(spec["environment"])
    time.tzset()
    if "tempfile" in sys.modules:
        sys.modules["tempfile"].tempdir = None  # type: ignore[attr-defined]
    importlib.invalidate_caches()
    kind, name = spec["target"]
    if not _path_is_safe():
        sys.path.insert(0, os.getcwd() if kind == "module" else os.path.dirname(os.path.realpath(name)))
    sys.argv[:] = [name, *spec["arguments"]]
    return kind, name


def run(kind: str, name: str) -> None:
    """Run the program; returns or raises as it does."""
    if kind == "module":
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(name, run_name="__main__")


class _Recorder:
    """Writes the name of every module that is looked for to a file; finds none itself."""

    def __init__(self, file: int) -> None:
        os.set_inheritable(file, False)
        self._file, self._process = file, os.getpid()

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if os.getpid() == self._process:
            os.write(self._file, f"{name}\n".encode())


def _path_is_safe() -> bool:
    """Whether neither the folder of a script nor the working directory is searched for modules."""
    return bool(sys.flags.isolated or getattr(sys.flags, "safe_path", False))


def _serve(control: socket.socket) -> dict[str, Any]:
    answer = _imported(json.loads(_line(control)))
    control.sendall(json.dumps(answer).encode() + b"\n")
    if "modules" not in answer:
        os._exit(0)
    gc.collect()
    gc.freeze()
    return _fork_sessions(control)


def _line(control: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        chunk = control.recv(65536)
        if not chunk:
            os._exit(0)
        data += chunk
    return data


def _imported(wanted: dict[str, Any]) -> dict[str, Any]:
    """Import those of the modules `wanted` that lie in the site packages of this interpreter, and belong to
    no distribution of the program's own packages. Says which are here now, how many were imported, and which
    variables they have looked at; or which one library every session must import by itself, and why."""
    if not hasattr(socket, "recv_fds"):
        return {"refused": "its Python is older than 3.9"}
    sites, own = _site_folders(), _own_packages(wanted["own"])
    files, before = len(os.listdir("/proc/self/fd")), len(sys.modules)
    reads, end = _watch_variables()
    skipped = {*own, *wanted["apart"]}
    for name in wanted["modules"]:
        top = name.partition(".")[0]
        if name in sys.modules or top in skipped or not _is_installed(top, sites):
            continue
        try:
            importlib.import_module(name)
        except ImportError:
            continue  # optional, as it was for the program
        except Exception as error:  # whatever a library raises
            return {"apart": top, "why": f"{type(error).__name__}: {error}"}
        if len(os.listdir("/proc/self/task")) > 1:
            return {"apart": top, "why": "it starts threads when it is imported"}
        if len(os.listdir("/proc/self/fd")) > files:
            return {"apart": top, "why": "it opens files or connections when it is imported"}
        if "*" in reads:
            return {"apart": top, "why": "it looks at all variables when it is imported"}
    end()
    tops = {name.partition(".")[0] for name in sys.modules} - {"__main__"}
    if both := own & tops:
        return {"refused": f"its libraries import the program itself ({', '.join(sorted(both))})"}
    return {"modules": sorted(tops), "count": len(sys.modules) - before, "reads": sorted(reads)}


def _site_folders() -> tuple[str, ...]:
    import sysconfig

    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    folders += [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    return tuple(os.path.realpath(folder) + os.sep for folder in folders)


def _is_installed(top: str, sites: tuple[str, ...]) -> bool:
    """Whether a top-level module lies in the site packages."""
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError, AttributeError):
        return False
    places = [spec.origin or "", *(spec.submodule_search_locations or ())] if spec is not None else []
    return any(os.path.realpath(place).startswith(sites) for place in places if place)


def _own_packages(tops: Iterable[str]) -> set[str]:
    """These, and what else the same distributions have: a program may consist of several packages."""
    from importlib import metadata

    if not hasattr(metadata, "packages_distributions"):  # Python 3.9
        return set(tops)
    owners = metadata.packages_distributions()
    own = {owner for top in tops for owner in owners.get(top, ())}
    return set(tops) | {top for top, names in owners.items() if own.intersection(names)}


def _watch_variables() -> tuple[set[str], Callable[[], None]]:
    """Note which environment variables Python code looks at from now on; `*` stands for all of them. Returns
    their names, which grow, and a function that ends this."""
    names: set[str] = set()
    kind: Any = type(os.environ)

    class Watched(kind):  # type: ignore[misc]
        def __getitem__(self, name: str) -> Any:
            names.add(name)
            return super().__getitem__(name)

        def __contains__(self, name: object) -> bool:
            names.add(str(name))
            return bool(super().__contains__(name))

        def __iter__(self) -> Any:
            names.add("*")
            return super().__iter__()

    def end() -> None:
        os.environ.__class__ = kind

    os.environ.__class__ = Watched
    return names, end


def _fork_sessions(control: socket.socket) -> dict[str, Any]:
    """Fork until the socket is closed. Returns in the children, with what they are to run."""
    parent = os.getpid()
    waking, wake = os.pipe()
    for end in (waking, wake):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    sessions: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([control.fileno(), waking], [], [])
        if waking in ready:
            os.read(waking, 4096)
            _report_ended(sessions)
        if control.fileno() not in ready:
            continue
        message, files, _, _ = socket.recv_fds(control, 1, 5)
        if not message:
            os._exit(0)
        try:
            child = os.fork()
        except OSError as error:
            os.write(files[3], f"{error.strerror}\n".encode())
            os.close(files.pop(3))
        else:
            if child == 0:
                return _begin_session(files, parent)
            sessions[child] = files.pop(3)
        for file in files:
            os.close(file)


def _report_ended(sessions: dict[int, int]) -> None:
    while sessions:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child == 0:
            return
        pipe = sessions.pop(child, None)
        if pipe is not None:
            code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)
            _tell(pipe, code)
            os.close(pipe)


def _tell(pipe: int, number: int) -> None:
    try:
        os.write(pipe, b"%d\n" % number)
    except OSError:  # nobody asks any more
        return


def _begin_session(files: list[int], parent: int) -> dict[str, Any]:
    """Become a session: with its own process group, pipes and signals, and nothing of other sessions."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _die_with(parent)
    _tell(files[3], os.getpid())  # only now can the group be signalled
    for number in range(3):
        os.dup2(files[number], number)
    os.dup2(files[4], 3)
    os.closerange(4, 1 + max(map(int, os.listdir("/proc/self/fd"))))
    spec = _read_spec(3)
    if "numpy.random" in sys.modules:  # Python's own generator is seeded anew by itself
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].seed()
    return spec


def _die_with(parent: int) -> None:
    """Here as this file is run by itself, by the interpreter of the servers, which may have no Buckeye."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it has ended meanwhile
        os._exit(1)


def _read_spec(number: int) -> dict[str, Any]:
    os.lseek(number, 0, os.SEEK_SET)
    with open(number, "rb") as file:
        spec: dict[str, Any] = json.loads(file.read())
    return spec


def _confine(spec: dict[str, Any]) -> None:
    from importlib.machinery import SourceFileLoader

    loader = SourceFileLoader("_confine", spec["script"])
    module = importlib.util.module_from_spec(
        importlib.util.spec_from_loader("_confine", loader)  # type: ignore[arg-type]
    )
    loader.exec_module(module)
    try:
        module.enter(spec)
    except OSError as error:
        sys.stderr.write(f"confine: {error}\n")
        sys.stderr.flush()
        os._exit(_CANNOT_CONFINE)


if __name__ == "__main__":
    run(*prepare(main()))
