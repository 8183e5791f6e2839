"""Sessions forked from a process with preloaded libraries are as isolated as separately started ones."""

import asyncio
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import venv
from dataclasses import replace
from pathlib import Path

import pytest
from tests.mcp.environment.leaks import assert_none_left
from tests.waiting import wait_for

from buckeye.base.process_guard import MARK_VARIABLE
from buckeye.mcp.client.session import SessionTimeouts, open_session
from buckeye.mcp.fork_server.pool import FORK_SERVERS, start_program
from buckeye.mcp.fork_server.program import Program, python_script
from buckeye.mcp.tasks.task_schema import StdioServer

PROGRAM = Path(__file__).with_name("program.py")


class Installed:
    """Interpreter with a library `widgets` and a program that imports it."""

    def __init__(self, folder, library):
        venv.create(folder / "venv", symlinks=True, with_pip=False)
        self.python = folder / "venv" / "bin" / "python"
        (self.site,) = (folder / "venv").glob("lib/python3*/site-packages")
        (self.site / "widgets.py").write_text(f"import os\nIMPORTED_BY = os.getpid()\n{library}\n")
        self.folder = folder / "work"
        self.folder.mkdir()
        shutil.copy(PROGRAM, self.site / "my_server.py")
        self.script = self.python.with_name("my-server")
        self.script.write_text(f"#!{self.python}\nimport sys\nfrom my_server import main\nsys.exit(main())\n")
        self.script.chmod(0o755)

    def program(self, *arguments, argv=None, **variables):
        argv = argv or (str(self.script), *arguments)
        return Program(argv=argv, env={"PATH": os.environ["PATH"], **variables}, cwd=self.folder)


@pytest.fixture
def installed(tmp_path):
    yield lambda library="": Installed(tmp_path, library)
    for script, parent in FORK_SERVERS.items():
        if str(tmp_path) in script.interpreter:
            parent._control.close()
    assert_none_left(str(tmp_path))
    FORK_SERVERS.clear()


async def ask(process, *questions):
    answers = []
    for question in questions:
        await process.write_line(json.dumps(question).encode())
        line = await process.read_line()
        answers.append(json.loads(line) if line is not None else None)
    return answers


async def session(program, *questions, preload=True):
    """Return the answers of one session, from its start to its end."""
    process = await start_program(program, name="test", preload=preload)
    try:
        return await ask(process, *questions)
    finally:
        await process.close()


def parent_of(program):
    return FORK_SERVERS[python_script(program)]


async def settled(program):
    """Run a first session, wait until the parent process is ready or has failed, and return its answer."""
    (first,) = await session(program, "who")

    def is_settled():
        parent = parent_of(program)
        return parent.is_ready() or parent._answer is not None

    await asyncio.to_thread(wait_for, is_settled, "a parent")
    return first


def after(first, *programs):
    """Return the answers of sessions of the programs, after a first session has settled."""

    async def run():
        await settled(first)
        return [(await session(program, "who"))[0] for program in programs]

    return asyncio.run(run())


def test_forked_session_has_own_state(installed, monkeypatch):
    monkeypatch.setenv("TRAINERS_KEY", "never-to-be-seen")
    here = installed()

    async def run():
        first = await settled(here.program("--one", SECRET="alpha"))
        process = await start_program(here.program("--two", SECRET="beta"), name="test", preload=True)
        second, again = await ask(process, "who", "who")
        (third,) = await session(here.program(SECRET="gamma"), "who")
        assert process.pid == second["pid"] == second["session"]
        await process.close()
        assert process.exit_status
        return first, second, again, third

    first, second, again, third = asyncio.run(run())
    assert first["imports"] == first["pid"]  # the first has imported it itself,
    assert second["imports"] == third["imports"] not in (second["pid"], third["pid"])  # the others have not
    for one, arguments, secret in ((first, ["--one"], "alpha"), (second, ["--two"], "beta")):
        assert one["arguments"] == arguments
        ours = ("PATH", "LC_CTYPE", MARK_VARIABLE)
        assert {k: v for k, v in one["environment"].items() if k not in ours} == {"SECRET": secret}
    assert third["arguments"] == []
    assert [one["asked"] for one in (first, second, again, third)] == [1, 1, 2, 1]
    assert {one["name"] for one in (first, second, third)} == {"my_server"}
    assert {one["cwd"] for one in (first, second, third)} == {str(here.folder)}
    assert second["files"] == third["files"]
    assert len(second["files"]) == 4  # its three pipes, and the one of the listing
    assert len({first["random"], second["random"], third["random"]}) == 3
    assert second["interrupt"]
    assert second["child"]


def test_forked_session_can_wrap_its_streams(installed):
    """The streams of the process that forks it may be seekable."""
    here = installed()

    async def run():
        await settled(here.program())
        return await session(here.program(), "wrap")

    assert asyncio.run(run()) == ["wrapped"]


def test_garbage_collection_in_a_forked_session_closes_no_files(installed):
    """Objects of the process that forks it may own numbers of files that the session opens again."""
    here = installed()

    async def run():
        await settled(here.program())
        return await session(here.program(), "collect")

    assert asyncio.run(run()) == [["anon_inode:[eventpoll]"] * 8]


def test_a_server_that_cannot_be_forked_is_started_normally(installed, caplog):
    here = installed()
    raw = Path(__file__).parents[1] / "environment" / "raw_server.py"
    refuse = (
        "import os\nimport sys\nimport widgets\nif widgets.IMPORTED_BY != os.getpid(): sys.exit('forked')\n"
    )
    (here.site / "my_server.py").write_text(
        f"{refuse}\nimport runpy\ndef main():\n    runpy.run_path({str(raw)!r}, run_name='__main__')\n"
    )
    server = StdioServer(command=str(here.script), args=[])

    async def said():
        async with open_session("board", server, timeouts=SessionTimeouts(start=60.0, call=60.0)) as session:
            return (await session.call("act", {"text": "hello"})).text

    async def run():
        first = await said()
        (parent,) = FORK_SERVERS.values()
        await asyncio.to_thread(wait_for, parent.is_ready, "a parent")
        return [first, await said(), await said()]

    with caplog.at_level("WARNING"):
        assert asyncio.run(run()) == ["You said hello."] * 3
    assert len([record for record in caplog.records if "not forked" in record.message]) == 1


def test_variables_of_session_are_not_in_memory_of_others(installed):
    here = installed()
    secret = "a-secret-of-one-session-alone"

    async def run():
        await settled(here.program())
        process = await start_program(here.program(SECRET=secret), name="test", preload=True)
        own = await ask(process, f"find {secret[::-1]}")
        other = await session(here.program(), f"find {secret[::-1]}")
        await process.close()
        return own, other

    assert asyncio.run(run()) == ([True], [False])


def test_forked_session_reports_its_exit(installed, wording):
    here = installed()

    async def run():
        await settled(here.program())
        process = await start_program(here.program(), name="test", preload=True)
        answers = await ask(process, "who", "end")
        await process.wait_for_exit()
        words = process.describe_end()
        await process.close()
        return answers, words

    (_, nothing), words = asyncio.run(run())
    assert nothing is None
    assert words == wording


def test_sessions_start_normally_after_parent_ended(installed, caplog):
    caplog.set_level(logging.INFO)
    here = installed()

    async def run():
        await settled(here.program())
        process = await start_program(here.program(), name="test", preload=True)
        ((before,),) = [await ask(process, "who")]
        os.kill(before["imports"], signal.SIGKILL)
        assert await process.read_line() is None  # it ends with its parent
        await process.wait_for_exit()
        assert process.exit_status
        await process.close()
        return [(await session(here.program(), "who"))[0] for _ in range(2)]

    for after in asyncio.run(run()):
        assert after["imports"] == after["pid"]
    assert len([message for message in caplog.messages if "not forked" in message]) == 1


@pytest.mark.parametrize(
    ("library", "reason"),
    [
        ("import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()", "threads"),
        ("import socket\nKEPT = socket.socket()", "connections"),
        ("SEEN = dict(os.environ)", "all variables"),
        ("import my_server", "the program itself"),
        ("if not os.environ.get('SECRET'): raise ValueError('no')", "ValueError: no"),
        ("if not os.environ.get('SECRET'): os._exit(7)", "exited"),
    ],
)
def test_libraries_that_cannot_be_shared_disable_forking(installed, caplog, library, reason):
    caplog.set_level(logging.INFO)
    program = installed(library).program(SECRET="given")
    (one,) = after(program, program)
    assert one["imports"] == one["pid"]
    (message,) = [record.message for record in caplog.records if "not forked" in record.message]
    assert reason in message


def test_session_with_other_value_of_read_variable_executes_script(installed):
    program = installed("FLAVOUR = os.environ.get('FLAVOUR')").program
    first, others = program(FLAVOUR="sour"), (program(), program(FLAVOUR="sweet"), program(OTHER="one"))
    plain, sweet, other = after(first, *others)
    assert sweet["imports"] == sweet["pid"]
    assert plain["imports"] == other["imports"] != plain["pid"]


def test_sessions_in_separate_folders_are_forked_from_one_process(installed, tmp_path):
    """Their variables also name different directories, as those of rollouts do."""
    here = installed()
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()

    programs = [replace(here.program(HOME=str(folder)), cwd=folder) for folder in folders]
    first, second = after(programs[0], *programs)
    assert first["imports"] == second["imports"] not in (first["pid"], second["pid"])
    assert [first["cwd"], second["cwd"]] == [str(folder) for folder in folders]


def test_own_packages_of_program_are_not_shared(installed):
    """The packages belong to one distribution, whose RECORD tells them apart from libraries."""
    here = installed()
    (here.site / "beside_it.py").write_text("import os\nIMPORTED_BY = os.getpid()\n")
    record = here.site / "mine-1.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
    (record / "RECORD").write_text("my_server.py,,\nbeside_it.py,,\n")
    program = here.site / "my_server.py"
    text = program.read_text().replace("import widgets\n", "import beside_it\nimport widgets\n")
    program.write_text(text.replace('"random": RANDOM', '"random": beside_it.IMPORTED_BY'))
    (one,) = after(here.program(), here.program())
    assert one["imports"] != one["pid"] == one["random"]


def test_other_programs_are_not_preloaded(installed):
    here = installed()
    python = str(here.python)
    for argv in (("sh", "-c", "true"), (python, "-m", "my_server"), (python, str(here.script)), ("no-such",)):
        assert python_script(here.program(argv=argv)) is None
    search = f"{here.script.parent}{os.pathsep}{os.environ['PATH']}"
    assert python_script(here.program(argv=("my-server", "--flag"), PATH=search)).path == here.script

    async def run():
        return [(await session(here.program(), "who", preload=False))[0] for _ in range(2)]

    assert all(one["imports"] == one["pid"] for one in asyncio.run(run()))
    assert FORK_SERVERS == {}


def test_killed_process_leaves_no_forked_sessions(installed):
    here = installed()
    code = f"""
import asyncio, os
from tests.mcp.fork_server import test_preload as t
here = t.Installed.__new__(t.Installed)
here.script, here.folder = {str(here.script)!r}, t.Path({str(here.folder)!r})
async def run():
    await t.settled(here.program())
    processes = [await t.start_program(here.program(), name="x", preload=True) for _ in range(3)]
    answers = [await t.ask(process, "who") for process in processes]
    assert len({{answer[0]["imports"] for answer in answers}}) == 1
    print("up", flush=True)
    await asyncio.sleep(600)
asyncio.run(run())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "up\n"
        process.kill()
    assert_none_left(str(here.python))
