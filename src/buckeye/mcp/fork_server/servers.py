"""The processes that have imported a program's libraries, one for each program, and what is known of them."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from buckeye.base.process import clean_environment
from buckeye.base.process_guard import GUARD, MARK
from buckeye.mcp.client.server_process import ServerProcess
from buckeye.mcp.fork_server.forked_process import ForkedProcess, ForkFailed, fork_session, sealed
from buckeye.mcp.fork_server.program import Program, PythonCommand, hiding, python_command, start_variables

log = logging.getLogger(__name__)

SCRIPT = Path(__file__).with_name("server.py")
CONFINE = Path(__file__).parents[1] / "sandbox" / "confine.py"
_IMPORT_SECONDS = 120.0
_MOST = 8
_MOST_APART = 4
"""Libraries that sessions import by themselves: each costs another start of the process."""
_TAIL = 2_000
State = Literal["new", "learning", "importing", "ready", "off"]


class Parent:
    """The parent of one program's sessions. The first session shows what the program imports; a process then
    imports that, and later sessions are forked from it."""

    def __init__(self, command: PythonCommand) -> None:
        self.command = command
        self.state: State = "new"
        self._control: socket.socket | None = None
        self._reads: dict[str, str | None] = {}
        self._modules: frozenset[str] = frozenset()

    def fits(self, program: Program) -> bool:
        """Whether a session may be forked: its libraries have seen no other values of variables, and are
        those that it would import itself."""
        if self.state != "ready" or any(program.env.get(k) != v for k, v in self._reads.items()):
            return False
        found = hiding(self.command.searched_first(program), self._modules)
        if found is not None:
            self.refuse(f"{found} hides an installed module of that name")
        return found is None

    async def fork(self, program: Program, arguments: tuple[str, ...]) -> ForkedProcess:
        """A session. Raises ForkFailed."""
        assert self._control is not None
        try:
            return await fork_session(self._control, self._spec(program, arguments))
        except ForkFailed as error:
            self.refuse(str(error))
            raise

    def learn(self, program: Program, arguments: tuple[str, ...]) -> Lesson:
        """How to start the session that shows what the program imports."""
        self.state = "learning"
        return Lesson(self, {**self._spec(program, arguments), "confine": None, "cwd": None})

    def import_all(self, names: list[str]) -> None:
        """Have a new process import what a session has looked for; returns at once."""
        self.state = "importing"
        threading.Thread(target=self._live, args=(names,), name="preload", daemon=True).start()

    def refuse(self, reason: str) -> None:
        """Fork no more; every session is started by itself."""
        if self.state != "off":
            self.state = "off"
            log.info("Every session of %s imports its libraries by itself: %s", self.command.shown, reason)

    def _spec(self, program: Program, arguments: tuple[str, ...]) -> dict[str, Any]:
        confine = None if program.confine is None else {**program.confine, "script": str(CONFINE)}
        return {
            "target": self.command.target,
            "arguments": arguments,
            "environment": dict(program.env),
            "cwd": None if program.cwd is None else str(program.cwd),
            "confine": confine,
        }

    def _live(self, names: list[str]) -> None:
        """Start the process, and note how it ends. It is started again without a library that every session
        must import by itself."""
        apart: dict[str, str] = {}
        while (found := self._serve(names, apart)) is not None:
            apart |= found

    def _serve(self, names: list[str], apart: Mapping[str, str]) -> dict[str, str] | None:
        """One process, to its end: None, or the library without which another one could serve, and why."""
        ours, theirs = socket.socketpair()
        command = self.command
        env = {**clean_environment({}), **dict(command.variables)}
        argv = [command.interpreter, *command.flags, str(SCRIPT), "serve", str(theirs.fileno())]
        try:
            process = subprocess.Popen(  # noqa: S603  a list of words, without a shell
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=env,
                cwd="/",
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except OSError as error:
            self.refuse(f"{command.interpreter} cannot be run: {error.strerror}")
            return None
        finally:
            theirs.close()
        GUARD.watch(process.pid)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        found = self._begin(ours, names, env, apart)
        tail = b""
        while chunk := os.read(process.stdout.fileno(), 65536):
            tail = (tail + chunk)[-_TAIL:]
        process.stdout.close()
        code = process.wait()
        GUARD.forget(process.pid)
        if found is None:
            words = tail.decode(errors="replace").strip()
            self.refuse(f"their parent ended with code {code}" + (f": {words}" if words else ""))
        return found

    def _begin(
        self, control: socket.socket, names: list[str], env: dict[str, str], apart: Mapping[str, str]
    ) -> dict[str, str] | None:
        """Have it import; None once sessions are forked, or never will be."""
        wanted = {"modules": names, "own": self.command.own, "apart": list(apart)}
        control.settimeout(_IMPORT_SECONDS)
        try:
            control.sendall(json.dumps(wanted).encode() + b"\n")
            with control.makefile("rb") as answers:
                answer = json.loads(answers.readline() or b'{"refused": "the process that did so ended"}')
        except (OSError, ValueError) as error:
            answer = {"refused": f"no answer within {_IMPORT_SECONDS:g} s ({error})"}
        if "modules" not in answer:
            control.close()
            if "apart" in answer and len(apart) < _MOST_APART:
                return {answer["apart"]: answer["why"]}
            self.refuse(answer.get("refused") or f"{answer['apart']}: {answer['why']}")
            return None
        left = "; ".join(f"{name}: {why}" for name, why in apart.items())
        if left and not answer["count"]:
            control.close()
            self.refuse(left)
            return None
        self._reads = {name: env.get(name) for name in answer["reads"]}
        self._modules = frozenset(answer["modules"])
        self._control = control
        said = "Sessions of %s are forked from a process that has imported %d modules%s"
        by_each = f". Each imports by itself what cannot be shared ({left})" if left else ""
        log.info(said, self.command.shown, answer["count"], by_each)
        self.state = "ready"
        return None


class Lesson:
    """The start of a session that shows what its program imports. `argv` is the command, `files` are the
    descriptors that it is to be handed."""

    def __init__(self, parent: Parent, spec: dict[str, Any]) -> None:
        self._parent = parent
        self._names = os.memfd_create("names", os.MFD_CLOEXEC)
        self._spec = sealed({**spec, "learn": self._names})
        self.files = (self._spec, self._names)
        command = parent.command
        self.argv = (command.interpreter, *command.flags, str(SCRIPT), "learn", str(self._spec))

    def answered(self) -> None:
        """The session has answered for the first time: what it needs to start, it has imported."""
        size = os.fstat(self._names).st_size
        names = os.pread(self._names, size, 0).decode(errors="replace").split()
        self._parent.import_all(list(dict.fromkeys(names)))
        self._close()

    def failed(self) -> None:
        """It has ended without an answer: another one may show it."""
        if self._parent.state == "learning":
            self._parent.state = "new"
            self._close()

    def _close(self) -> None:
        for file in self.files:
            with contextlib.suppress(OSError):
                os.close(file)


class Parents:
    """All parents of this process. `starts` counts sessions by how they were started."""

    def __init__(self) -> None:
        self._parents: dict[PythonCommand, Parent] = {}
        self.starts: Counter[Literal["forked", "plain"]] = Counter()

    def of(self, program: Program) -> tuple[Parent, tuple[str, ...]] | None:
        """The parent of a program, with the program's arguments; None if it can have none."""
        if not hasattr(os, "memfd_create"):  # not Linux
            return None
        found = python_command(program.argv, start_variables(program.env), program.env.get("PATH"))
        if found is None:
            return None
        command, arguments = found
        parent = self._parents.get(command)
        if parent is None:
            if len(self._parents) >= _MOST:
                return None
            parent = self._parents[command] = Parent(command)
        return parent, arguments


PARENTS = Parents()


async def start_program(program: Program, *, name: str, preload: bool) -> ServerProcess:
    """A process of its own. Without `preload`, and for programs of which nothing can be imported ahead, it is
    started as it stands. What it starts itself ends with it. Raises StartError."""
    mark = GUARD.new_mark()
    program = replace(program, env={**program.env, MARK: mark})
    lesson: Lesson | None = None
    found = PARENTS.of(program) if preload else None
    if found is not None:
        parent, arguments = found
        if parent.fits(program):
            try:
                forked = await parent.fork(program, arguments)
            except ForkFailed:
                pass  # it has been said, and is not tried again
            else:
                PARENTS.starts["forked"] += 1
                return ServerProcess(forked, name, forked.close, mark=mark)
        elif parent.state == "new":
            lesson = parent.learn(program, arguments)
    PARENTS.starts["plain"] += 1
    argv, env = program.command_line(program.argv if lesson is None else lesson.argv)
    files = () if lesson is None else lesson.files
    try:
        return await ServerProcess.start(
            argv, env=env, name=name, cwd=program.cwd, files=files, listener=lesson, mark=mark
        )
    except BaseException:
        if lesson is not None:
            lesson.failed()
        raise
