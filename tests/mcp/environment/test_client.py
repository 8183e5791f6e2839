"""Sessions with real servers, the misbehaving ones above all."""

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from tests.mcp.environment.leaks import assert_none_left, processes_with

from buckeye.base.process_guard import MARK
from buckeye.mcp.client.errors import (
    BadAnswer,
    OutputFlood,
    SessionLost,
    StartError,
    ToolsChanged,
    ToolTimeout,
)
from buckeye.mcp.client.session import Deadlines, open_session
from buckeye.mcp.tasks.task_schema import StdioServer

RAW = str(Path(__file__).with_name("raw_server.py"))
PATIENT = Deadlines(start=60.0, call=60.0, close=5.0)


@pytest.fixture
def marker():
    """Is in the environment of every server of a test; afterwards no process has it any more."""
    name = f"marker-{uuid.uuid4()}"
    yield name
    assert_none_left(name)


def raw(marker, way=""):
    return StdioServer(command=sys.executable, args=[RAW, way], env={"MARKER": marker})


def play(server, *calls, deadlines=PATIENT):
    """Open a session, make the calls one after the other, and return their results."""

    async def run():
        async with open_session("board", server, deadlines=deadlines) as session:
            return [await session.call(name, arguments) for name, arguments in calls]

    return asyncio.run(run())


ACT = ("act", {"text": "hello"})


def test_a_call_and_its_result(marker):
    (result,) = play(raw(marker), ACT)
    assert result.text == "You said hello."
    assert (result.is_error, result.structured, dict(result.dropped)) == (False, None, {})


def test_the_tools_as_announced(marker):
    async def run():
        async with open_session("board", raw(marker), deadlines=PATIENT) as session:
            return session.tools

    tools = asyncio.run(run())
    assert list(tools) == ["setup", "act", "recall", "environment", "evaluate"]
    assert tools["act"].input_schema["properties"] == {"text": {"type": "string"}}
    assert tools["act"].description == "The tool act."


def test_a_server_sees_nothing_of_our_environment(marker, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "our-secret")
    monkeypatch.setenv("BUCKEYE_RUN_ID", "our-run")
    (result,) = play(raw(marker), ("environment", {}))
    seen = json.loads(result.text)
    assert seen.pop("MARKER") == marker
    assert seen.pop("PATH") == os.environ["PATH"]
    ours = {
        name for name in seen if name.endswith(("_CA_CERTS", "_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR"))
    }
    assert set(seen) - ours <= {
        "HOME",
        "LANG",
        "LC_ALL",
        "LC_CTYPE",
        "TMPDIR",
        "TZ",
        MARK,
    }  # Python sets LC_CTYPE


@pytest.mark.parametrize("way", ["modern-only", "modern-strict"])
def test_a_server_that_knows_only_the_newer_handshake(marker, way):
    (result,) = play(raw(marker, way), ACT)
    assert result.text == "You said hello."


def test_noise_between_the_messages_is_left_out(marker):
    (result,) = play(raw(marker, "noise"), ACT)
    assert result.text == "You said hello."


def test_parts_that_are_no_text_are_counted(marker):
    (result,) = play(raw(marker, "image"), ACT)
    assert (result.text, dict(result.dropped)) == ("seen", {"image": 1})


@pytest.mark.parametrize(
    ("way", "said", "structured"),
    [("announces-more", "You said hello.", None), ("announces-other", "You said it.", {"line": 1})],
)
def test_a_result_that_is_not_as_announced_is_read_all_the_same(marker, way, said, structured):
    (result,) = play(raw(marker, way), ACT)
    assert (result.text, result.structured, result.is_error) == (said, structured, False)


def test_refused_arguments_are_for_the_model(marker):
    (result,) = play(raw(marker, "refuses-arguments"), ACT)
    assert result.is_error
    assert "text must be short" in result.text


def test_an_error_does_not_tell_the_key_of_its_server(marker):
    """It is shown to the policy, and written to the rollouts."""

    async def run():
        opened = open_session("board", raw(marker, "tells"), deadlines=PATIENT, secrets=[marker])
        async with opened as session:
            return [await session.call(name, arguments) for name, arguments in (("recall", {}), ACT)]

    for result in asyncio.run(run()):
        assert result.is_error
        assert result.text == "not accepted: (redacted)"


def test_new_tools_do_not_disturb(marker):
    first, second = play(raw(marker, "tool-added"), ACT, ACT)
    assert first.text == second.text == "You said hello."


QUICK_START = Deadlines(start=0.5, call=60.0, close=0.2)
SLOW_START = Deadlines(start=3.0, call=60.0, close=0.2)  # it has to say something first
QUICK_CALL = Deadlines(start=60.0, call=0.5, close=0.2)


@pytest.mark.parametrize(
    ("way", "error", "says", "deadlines"),
    [
        ("hang-in-start", StartError, "did not start and shake hands within 0.5 s", QUICK_START),
        ("garbage-in-start", StartError, "Usage: server", SLOW_START),
        ("die-in-start", StartError, "no such board", PATIENT),
        ("endless-tools", BadAnswer, "more than 100 pages", PATIENT),
        ("hang-in-call", ToolTimeout, "act gave no result within 0.5 s", QUICK_CALL),
        ("hang-with-child", ToolTimeout, "act gave no result within 0.5 s", QUICK_CALL),
        ("garbage", ToolTimeout, "this is not JSON", QUICK_CALL),
        ("die-in-call", SessionLost, "exit code 3", PATIENT),
        ("huge-result", OutputFlood, "16 MiB", PATIENT),
        ("flood", OutputFlood, "16 MiB", PATIENT),
        ("flood-in-start", OutputFlood, "10000 lines that are no messages of MCP, the last: 'y'", PATIENT),
        ("flood-stderr", OutputFlood, "error output", PATIENT),
        ("wrong-shape", BadAnswer, "act", PATIENT),
        ("internal-error", BadAnswer, "the database is down", PATIENT),
        ("tool-gone", ToolsChanged, "'act' is gone", PATIENT),
        ("tool-gone-silently", ToolsChanged, "'act' is gone", PATIENT),
        ("tool-differs", ToolsChanged, "other arguments", PATIENT),
    ],
)
def test_a_misbehaving_server_is_a_typed_error(caplog, marker, way, error, says, deadlines):
    with pytest.raises(error) as caught:
        play(raw(marker, way), ACT, ACT, ACT, deadlines=deadlines)
    gc.collect()  # what nobody has asked an ended task would be logged now
    assert not caplog.records
    assert type(caught.value) is error
    assert "server 'board'" in str(caught.value)
    assert says in str(caught.value)


def test_the_last_words_of_a_dead_server_are_in_the_message(marker):
    with pytest.raises(SessionLost, match="out of cheese"):
        play(raw(marker, "die-in-call"), ACT)


GROUP = """\
import asyncio
async def fails(): raise ValueError("no shop.db here")
async def serve():
    async with asyncio.TaskGroup() as group: group.create_task(fails())
asyncio.run(serve())"""


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("def f(n): return f(n - 1) if n else 1 / 0\nf(50)", ["ZeroDivisionError: division by zero"]),
        (GROUP, ["ValueError: no shop.db here"]),
        ("class Server: pass\nServer().list_tools()", ["no attribute 'list_tools'", "pip install 'mcp<2'"]),
        ("import sys\nsys.exit('usage:\\n    --db FILE')", ["usage:\n    --db FILE"]),
    ],
)
def test_a_traceback_of_a_server_is_what_went_wrong(marker, program, says):
    server = StdioServer(command=sys.executable, args=["-c", program], env={"MARKER": marker})
    with pytest.raises(StartError) as caught:
        play(server, deadlines=PATIENT)
    assert all(words in str(caught.value) for words in says)
    assert "Traceback" not in str(caught.value)
    assert "line 1" not in str(caught.value)


def test_a_server_that_does_not_end_is_killed(marker):
    (result,) = play(raw(marker, "stays"), ACT, deadlines=Deadlines(start=60.0, call=60.0, close=0.2))
    assert result.text == "You said hello."


def test_a_program_that_is_not_there(marker):
    with pytest.raises(StartError, match="no-such-program cannot be run: No such file"):
        play(StdioServer(command="no-such-program"), ACT)


def test_cancelling_a_rollout_leaves_no_process(marker):
    async def run():
        async with open_session("board", raw(marker, "hang-in-call"), deadlines=PATIENT) as session:
            await session.call(*ACT)

    async def cancelled():
        playing = asyncio.create_task(run())
        while not processes_with(marker):
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.3)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing

    asyncio.run(cancelled())


def test_servers_and_their_children_die_with_us(marker):
    """A process that is killed in the middle of a call leaves neither the server nor the server's child."""
    script = f"""
import asyncio, sys
sys.path.insert(0, {str(Path.cwd())!r})
from tests.mcp.environment.test_client import ACT, PATIENT, open_session, raw

async def run():
    async with open_session("board", raw({marker!r}, "hang-with-child"), deadlines=PATIENT) as session:
        await session.call(*ACT)

asyncio.run(run())
"""
    user = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "MARKER": marker})
    try:
        for _ in range(2_000):  # itself, its guard (which has no environment), the server, its child
            if len(processes_with(marker)) >= 3:
                break
            assert user.poll() is None
            asyncio.run(asyncio.sleep(0.02))
    finally:
        user.send_signal(signal.SIGKILL)
        user.wait()


@pytest.mark.parametrize("count", [8])
def test_sessions_do_not_see_each_other(marker, count):
    async def one(number):
        async with open_session("board", raw(marker), deadlines=PATIENT) as session:
            await session.call("act", {"text": f"secret {number}"})
            await asyncio.sleep(0)
            return (await session.call("recall", {})).text

    async def run():
        return await asyncio.gather(*(one(number) for number in range(count)))

    assert asyncio.run(run()) == [f"secret {number}" for number in range(count)]
