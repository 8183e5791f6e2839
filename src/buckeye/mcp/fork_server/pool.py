"""Start server programs. Python scripts share one fork server per script, which has their libraries."""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path
from weakref import WeakKeyDictionary

from buckeye.base.process import ChildProcess, clean_environment
from buckeye.base.process_guard import GUARD, MARK_VARIABLE
from buckeye.errors import BuckeyeError
from buckeye.mcp.client.server_process import ServerProcess
from buckeye.mcp.fork_server.forked_process import ForkedProcess, ForkError, fork_session
from buckeye.mcp.fork_server.program import Program, PythonScript, python_script
from buckeye.mcp.sandbox.confine_command import start_command

log = logging.getLogger(__name__)

SERVER = Path(__file__).with_name("server.py")
_SEND_SECONDS, _EXIT_SECONDS = 5.0, 1.0
_MAX_SERVERS = 8

FORK_SERVERS: dict[PythonScript, ForkServer] = {}
_PARENTS: WeakKeyDictionary[ServerProcess, ForkServer] = WeakKeyDictionary()
"""Fork server of each forked process."""
START_COUNTS: Counter[str] = Counter()
"""The key `forked` counts the sessions that fork servers of this process have forked."""


class ForkServer:
    """Process that imports the libraries of one program, and forks its sessions."""

    def __init__(self, script: PythonScript) -> None:
        """Start the fork server, which imports the libraries in the background. Raises OSError."""
        self._script = script
        self._answer: str | None = None
        self._control, remote_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        argv = [script.interpreter, str(SERVER), str(remote_end.fileno()), str(script.path)]
        with remote_end:
            self._process = ChildProcess(
                argv,
                env={**clean_environment({}), **dict(script.variables)},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=Path("/"),
                pass_fds=(remote_end.fileno(),),
                guarded=True,
            )

    def is_ready(self) -> bool:
        """Return True if the fork server has imported the libraries and can fork sessions."""
        if self._answer is None:
            with contextlib.suppress(BlockingIOError):
                self._answer = self._control.recv(4096).decode(errors="replace") or "the fork server exited"
                if not self._answer.isdigit():
                    self._stop_forking_at_exit(self._answer)
                    return False
                self._control.settimeout(_SEND_SECONDS)
                log.info(
                    "Forking sessions of %s with %s imported modules", self._script.path.name, self._answer
                )
        return (self._answer or "").isdigit()

    async def fork(self, program: Program) -> ForkedProcess:
        """Fork a session. Raises ForkError."""
        spec = {
            "argv": [str(self._script.path), *program.argv[1:]],
            "environment": dict(program.env),
            "cwd": None if program.cwd is None else str(program.cwd),
            "confine": program.confine,
        }
        try:
            return await fork_session(self._control, spec)
        except ForkError as error:
            self._stop_forking_at_exit(str(error))
            raise

    def _stop_forking_at_exit(self, reason: str) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_SECONDS)
        self.stop_forking(reason)

    def stop_forking(self, reason: str, *, level: int = logging.INFO) -> None:
        """Fork no more sessions, and log the reason. Running sessions continue."""
        self._answer = reason
        name = self._script.path.name
        log.log(level, "Sessions of %s start slower, because they are not forked: %s", name, reason)


async def start_program(program: Program, *, name: str, preload: bool) -> ServerProcess:
    """Start the process of a server, with `preload` from a fork server if possible.

    A fork server needs a Python script that is installed next to its interpreter. The first sessions of a
    script start normally, while its fork server imports the libraries. When the process closes, all of its
    children are killed. Raises StartError.
    """
    mark = GUARD.new_mark()
    program = replace(program, env={**program.env, MARK_VARIABLE: mark})
    parent = _find_fork_server(program) if preload else None
    if parent is not None and parent.is_ready():
        with contextlib.suppress(ForkError):  # `fork` has logged the reason
            forked = await parent.fork(program)
            START_COUNTS["forked"] += 1
            process = ServerProcess(forked, name, forked.close, mark=mark)
            _PARENTS[process] = parent
            return process
    argv, env = start_command(program)
    return await ServerProcess.start(argv, env=env, name=name, cwd=program.cwd, mark=mark)


def stop_forking_after(process: ServerProcess, error: BuckeyeError) -> bool:
    """Fork no more sessions of a program whose forked `process` failed to start.

    Return False if the process was not forked.
    """
    if (parent := _PARENTS.get(process)) is None:
        return False
    if parent.is_ready():
        parent.stop_forking(f"a forked session did not start: {error.message}", level=logging.WARNING)
    return True


def _find_fork_server(program: Program) -> ForkServer | None:
    script = python_script(program)
    if script is not None and script not in FORK_SERVERS and len(FORK_SERVERS) < _MAX_SERVERS:
        with contextlib.suppress(OSError):
            FORK_SERVERS[script] = ForkServer(script)
    return FORK_SERVERS.get(script) if script is not None else None
