"""Sessions with real servers, mostly misbehaving ones."""

import asyncio
import gc
import json
import os
import re
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from tests.mcp.environment.leaks import assert_none_left, processes_with

from buckeye.base.process_guard import MARK_VARIABLE
from buckeye.mcp.client.errors import (
    BadAnswerError,
    OutputFloodError,
    SessionLostError,
    StartError,
    ToolsChangedError,
    ToolTimeoutError,
)
from buckeye.mcp.client.session import SessionTimeouts, open_session
from buckeye.mcp.tasks.task_schema import StdioServer

pytestmark = pytest.mark.e2e

RAW = str(Path(__file__).with_name("raw_server.py"))
PATIENT = SessionTimeouts(start=60.0, call=60.0, close=5.0)


@pytest.fixture
def marker():
    """Marker for the environment of all servers of a test; no process may have it afterwards."""
    name = f"marker-{uuid.uuid4()}"
    yield name
    assert_none_left(name)


def raw(marker, way=""):
    return StdioServer(command=sys.executable, args=[RAW, way], env={"MARKER": marker})


def play(server, *calls, timeouts=PATIENT):
    """Open a session, make the calls in order, and return their results."""

    async def run():
        async with open_session("board", server, timeouts=timeouts) as session:
            return [await session.call(name, arguments) for name, arguments in calls]

    return asyncio.run(run())


ACT, SAID = ("act", {"text": "hello"}), "You said hello."


def test_server_does_not_inherit_environment(marker, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "our-secret")
    monkeypatch.setenv("BUCKEYE_RUN_ID", "our-run")
    (result,) = play(raw(marker), ("environment", {}))
    seen = json.loads(result.text)
    assert seen.pop("MARKER") == marker
    assert seen.pop("PATH") == os.environ["PATH"]
    certificates = ("_CA_CERTS", "_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR")
    seen = {name for name in seen if not name.endswith(certificates)}
    assert seen <= {
        "HOME",
        "LANG",
        "LC_ALL",
        "LC_CTYPE",
        "TMPDIR",
        "TZ",
        MARK_VARIABLE,
    }  # Python sets LC_CTYPE


@pytest.mark.parametrize(
    ("way", "said", "structured", "dropped"),
    [
        ("", SAID, None, {}),
        ("modern-only", SAID, None, {}),
        ("modern-strict", SAID, None, {}),
        ("noise", SAID, None, {}),
        ("tool-added", SAID, None, {}),
        ("stays", SAID, None, {}),
        ("image", "seen", None, {"image": 1}),
        ("half-character", "seen \ufffd", None, {}),
        ("announces-more", SAID, None, {}),
        ("announces-other", "You said it.", {"line": 1}, {}),
    ],
)
def test_imprecise_servers_give_results(marker, way, said, structured, dropped):
    results = play(raw(marker, way), ACT, ACT, timeouts=SessionTimeouts(start=60.0, call=60.0, close=0.2))
    for result in results:
        assert (result.text, result.is_error) == (said, False)
        assert (result.structured, dict(result.dropped)) == (structured, dropped)


def test_invalid_arguments_are_error_result(marker, wording):
    (result,) = play(raw(marker, "refuses-arguments"), ACT)
    assert result.is_error
    assert result.text == wording


def test_error_result_redacts_key_of_server(marker):
    """The error is shown to the policy and written to the rollouts."""

    async def run():
        opened = open_session("board", raw(marker, "tells"), timeouts=PATIENT, secrets=[marker])
        async with opened as session:
            return [await session.call(name, arguments) for name, arguments in (("recall", {}), ACT)]

    for result in asyncio.run(run()):
        assert result.is_error
        assert result.text == "not accepted: (redacted)"


QUICK_START = SessionTimeouts(start=0.5, call=60.0, close=0.2)
SLOW_START = SessionTimeouts(
    start=3.0, call=60.0, close=0.2
)  # it must send a message before its start counts
QUICK_CALL = SessionTimeouts(start=60.0, call=0.5, close=0.2)


@pytest.mark.parametrize(
    ("way", "error", "timeouts"),
    [
        ("hang-in-start", StartError, QUICK_START),
        ("garbage-in-start", StartError, SLOW_START),
        ("die-in-start", StartError, PATIENT),
        ("endless-tools", BadAnswerError, PATIENT),
        ("hang-in-call", ToolTimeoutError, QUICK_CALL),
        ("hang-with-child", ToolTimeoutError, QUICK_CALL),
        ("garbage", ToolTimeoutError, QUICK_CALL),
        ("die-in-call", SessionLostError, PATIENT),
        ("huge-result", OutputFloodError, PATIENT),
        ("flood", OutputFloodError, PATIENT),
        ("flood-in-start", OutputFloodError, PATIENT),
        ("flood-stderr", OutputFloodError, PATIENT),
        ("wrong-shape", BadAnswerError, PATIENT),
        ("internal-error", BadAnswerError, PATIENT),
        ("tool-gone", ToolsChangedError, PATIENT),
        ("tool-gone-silently", ToolsChangedError, PATIENT),
        ("tool-differs", ToolsChangedError, PATIENT),
        ("no-envelope", BadAnswerError, PATIENT),
    ],
)
def test_misbehaving_server_is_typed_error(caplog, marker, way, error, timeouts, wording):
    with pytest.raises(error) as caught:
        play(raw(marker, way), ACT, ACT, ACT, timeouts=timeouts)
    gc.collect()  # an exception never retrieved from a finished task would be logged now
    assert not caplog.records
    assert type(caught.value) is error
    assert re.split(r"; (?:exit code|signal)|\n", str(caught.value))[0] == wording


def test_missing_program_is_start_error(marker, refusal):
    with refusal(StartError):
        play(StdioServer(command="no-such-program"), ACT)


def test_cancelled_session_leaves_no_process(marker):
    async def run():
        async with open_session("board", raw(marker, "hang-in-call"), timeouts=PATIENT) as session:
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


def test_servers_end_when_client_is_killed(marker):
    """A process killed in the middle of a call leaves neither the server nor the server's child."""
    script = f"""
import asyncio
from buckeye.mcp.client.session import SessionTimeouts, open_session
from buckeye.mcp.tasks.task_schema import StdioServer
argv = dict(command={sys.executable!r}, args=[{RAW!r}, "hang-with-child"])
server = StdioServer(**argv, env={{"MARKER": {marker!r}}})

async def run():
    async with open_session("board", server, timeouts=SessionTimeouts(start=60.0, call=60.0)) as session:
        await session.call("act", {{"text": "hello"}})

asyncio.run(run())
"""
    user = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "MARKER": marker})
    try:
        for _ in range(2_000):  # the process, its guard (which has no environment), the server, its child
            if len(processes_with(marker)) >= 3:
                break
            assert user.poll() is None
            asyncio.run(asyncio.sleep(0.02))
    finally:
        user.send_signal(signal.SIGKILL)
        user.wait()
