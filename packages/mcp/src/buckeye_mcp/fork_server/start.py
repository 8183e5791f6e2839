"""Starting a program for a session: forked from a process with its libraries, or by itself."""

from __future__ import annotations

from dataclasses import replace

from buckeye.base.process_guard import GUARD, MARK
from buckeye_mcp.client.server_process import ServerProcess
from buckeye_mcp.fork_server.forked_process import ForkFailed
from buckeye_mcp.fork_server.program import Program
from buckeye_mcp.fork_server.servers import PARENTS, Lesson


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
