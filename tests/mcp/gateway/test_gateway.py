"""`buckeye gateway` as a process: sessions, access, and limits."""

import asyncio
import errno
import json
import os
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from tests.mcp.gateway.client import INITIALIZE, Client, events, gateway, request, said, scripted

from buckeye.mcp.gateway.app import create_app
from buckeye.mcp.gateway.gateway import Gateway
from buckeye.mcp.gateway.json_rpc import parse_message
from buckeye.mcp.gateway.settings import GatewayError, GatewaySettings, LaunchRequest
from buckeye.mcp.sandbox.process_runtimes import CommandRuntime
from buckeye.mcp.sandbox.runtime import SandboxLimits

pytestmark = pytest.mark.e2e

HAS_NAMESPACES = os.geteuid() == 0


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with gateway(tmp_path_factory.mktemp("served"), "--command", scripted()) as running:
        yield running


def test_env_headers_set_only_named_variables(tmp_path):
    ours = {"BUCKEYE_API_KEY": "key-of-the-gateway", "WANDB_API_KEY": "key-of-the-trainer"}
    bearer = {"Authorization": "Bearer key-of-the-gateway"}
    with gateway(tmp_path, "--command", scripted(), env=ours) as running:
        client = Client(running.url, **bearer, **{"Env-Foo-Bar": "v = 1", "Env-SEED": "7"}).open()
        seen = client.call("environment")
        assert seen["FOO_BAR"] == "v = 1"
        assert seen["SEED"] == "7"
        ours = {"PATH", "HOME", "PWD", "LANG", "LC_ALL", "LC_CTYPE", "TMPDIR", "TZ", "BUCKEYE_STARTED_BY"}
        certificates = ("_CA_CERTS", "_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR")
        own = {name for name in seen if name.startswith("XDG_")} | {"npm_config_cache", "UV_CACHE_DIR"}
        assert {name for name in seen if not name.endswith(certificates)} <= {*ours, *own, "FOO_BAR", "SEED"}
        if HAS_NAMESPACES:  # not even through /proc
            assert client.call("read", path=f"/proc/{running.process.pid}/environ") == "FileNotFoundError"
        assert "key-of-the" not in running.log()
        assert running.status(**bearer)["sessions"][0]["variables"] == ["FOO_BAR", "SEED"]


def test_error_redacts_values_of_variables(served):
    client = Client(served.url, **{"Env-Token": "last words"}).open()
    message = client.error(502, request("tools/call", {"name": "die"}))
    assert "exit code 3" in message
    assert "(redacted)" in message
    assert "last words" not in message


def test_invalid_env_header_is_refused(served):
    assert "env-9-" in Client(served.url, **{"Env-9-": "x"}).error(400).lower()


def test_twenty_concurrent_sessions_are_separate(served):
    def play(number):
        client = Client(served.url, **{"Env-Number": str(number)}).open()
        for turn in range(3):
            client.call("remember", value=[number, turn])
        seen = client.call("recall"), client.call("environment")["NUMBER"]
        client.close()
        return seen

    with ThreadPoolExecutor(20) as pool:
        for number, seen in enumerate(pool.map(play, range(20))):
            assert seen == ([[number, turn] for turn in range(3)], str(number))
    served.until(lambda: len(served.status()["sessions"]) < 20, "the sessions did not end")


def test_delete_ends_session_and_later_requests_get_reason(served, wording):
    client = Client(served.url).open()
    client.close()
    assert client.error(404, request("tools/call", {"name": "recall"})) == wording
    answer = Client(served.url).post(request("tools/list"), **{"mcp-session-id": "no-such"})
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == wording


def test_progress_is_sent_on_stream_of_its_request(served):
    client = Client(served.url).open()
    params = {"name": "progress", "arguments": {}, "_meta": {"progressToken": "t1"}}
    answer = client.post(request("tools/call", params, 50))
    assert answer.headers["content-type"].startswith("text/event-stream")
    messages = events(answer.text)
    assert [message["params"]["progress"] for message in messages[:-1]] == [0, 1, 2]
    assert messages[-1]["id"] == 50
    assert said(messages[-1]) == "finished"


def test_notifications_and_server_requests_are_sent_on_session_stream(served):
    client = Client(served.url).open()
    headers = {"mcp-session-id": client.session_id}
    with client.http.stream("GET", client.url, headers=headers) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith(":")  # the stream is open
        assert client.http.get(client.url, headers=headers).status_code == 409  # one is open already
        client.call("announce", data={"n": 1})
        notification = json.loads(next(line for line in lines if line.startswith("data: "))[6:])
        assert notification["params"]["data"] == {"n": 1}

        asking = threading.Thread(target=lambda: results.append(client.call("ask")))
        results = []
        asking.start()
        question = json.loads(next(line for line in lines if line.startswith("data: "))[6:])
        assert question["method"] == "sampling/createMessage"
        answer = client.post({"jsonrpc": "2.0", "id": question["id"], "result": {"said": "yes"}})
        assert answer.status_code == 202
        asking.join()
        assert results == ["yes"]


def test_errors_of_environment_are_forwarded_unchanged(served):
    answer = Client(served.url).open().post(request("resources/list", request_id="r-1"))
    assert answer.status_code == 200
    error = {"code": -32601, "message": "no method resources/list"}
    assert answer.json() == {"jsonrpc": "2.0", "id": "r-1", "error": error}


def test_body_with_line_breaks_is_one_message(served):
    client = Client(served.url).open()
    body = json.dumps(request("tools/call", {"name": "remember", "arguments": {"value": "a\nb"}}), indent=2)
    headers = {"mcp-session-id": client.session_id, "content-type": "application/json"}
    assert client.http.post(client.url, content=body, headers=headers).status_code == 200
    assert client.call("recall") == ["a\nb"]


@pytest.mark.e2e
def test_printed_lines_are_skipped_and_counted(tmp_path):
    with gateway(tmp_path, "--command", scripted("banner")) as running:
        Client(running.url).open()
        assert running.status()["sessions"][0]["lines_that_are_no_messages"] == 1


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"{}", 400),
        (b'[{"jsonrpc":"2.0","id":1,"method":"ping"}]', 400),
        (b'{"jsonrpc":"2.0","id":1,"method":"tools/list"}', 400),
        (b'{"jsonrpc":"2.0","id":{"a":1},"method":"initialize"}', 400),
        (b" " * (16 * 2**20 + 1), 413),
    ],
    ids=["json", "object", "batch", "session", "id", "size"],
)
def test_invalid_message_is_refused(served, body, status, wording):
    answer = httpx.post(served.url, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status
    assert answer.json()["error"]["message"] == wording


def discover(client, **headers):
    meta = {"io.modelcontextprotocol/protocolVersion": "2026-07-28"}
    message = request("server/discover", {"_meta": meta})
    return client.post(message, **{"mcp-protocol-version": "2026-07-28", **headers})


def test_discover_lists_revisions_with_handshake(served):
    answer = discover(Client(served.url))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == -32022
    assert "2025-06-18" in error["data"]["supported"]
    assert "2026-07-28" not in error["data"]["supported"]


@pytest.mark.parametrize("place", ["environment", pytest.param(".env", marks=pytest.mark.e2e)])
def test_gateway_requires_key(tmp_path, place):
    if place == ".env":
        (tmp_path / ".env").write_text("BUCKEYE_API_KEY=right\n")
    env = {"BUCKEYE_API_KEY": "right"} if place == "environment" else {}
    with gateway(tmp_path, "--key", "--command", scripted(), env=env) as running:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "right"}):
            assert "BUCKEYE_API_KEY" in Client(running.url, **headers).error(401)
        assert httpx.get(running.url.replace("/mcp", "/status")).status_code == 401
        assert httpx.get(running.url.replace("/mcp", "/health")).json() == {"status": "ok"}
        Client(running.url, Authorization="Bearer right").open().close()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example:8765"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Host": "localhost:8765"}, 200),
        ({"Origin": "http://localhost:3000"}, 403),  # a page of another program on this machine
    ],
)
def test_requests_of_other_origins_are_refused(served, headers, status):
    assert Client(served.url, **headers).post(request("initialize", INITIALIZE)).status_code == status


@pytest.mark.e2e
def test_session_above_limit_waits_and_is_refused_after_timeout(tmp_path, wording):
    words = ["--command", scripted(), "--sessions", "1", "--queue-seconds", "1"]
    with gateway(tmp_path, *words) as running:
        first = Client(running.url).open()
        answer = Client(running.url).post(request("initialize", INITIALIZE, 77))
        assert answer.status_code == 503
        assert answer.json()["id"] == 77
        assert answer.json()["error"]["message"] == wording

    words = ["--command", scripted(), "--sessions", "1"]
    with gateway(tmp_path, *words) as running, ThreadPoolExecutor(1) as pool:
        first = Client(running.url).open()
        second = pool.submit(Client(running.url).open)
        running.until(lambda: running.status()["waiting"] == 1, "nobody waits")
        first.close()
        assert second.result().call("recall") == []


@pytest.mark.e2e
def test_idle_and_old_sessions_are_ended(tmp_path):
    with gateway(tmp_path, "--command", scripted(), "--idle-seconds", "1") as running:
        client = Client(running.url).open()
        running.until(lambda: running.status()["running"] == 0, "it was not ended")
        assert "--idle-seconds" in client.error(404, request("tools/call", {"name": "recall"}))
        # a session that waits for an answer is not idle
        assert Client(running.url).open().call("sleep", seconds=1.5) == "awake"
    with gateway(tmp_path, "--command", scripted(), "--session-seconds", "0.5") as running:
        client = Client(running.url).open()
        sleep = {"name": "sleep", "arguments": {"seconds": 600}}
        assert "--session-seconds" in client.error(502, request("tools/call", sleep))


@pytest.mark.e2e
def test_session_of_disconnected_client_is_ended(tmp_path, wording):
    with gateway(tmp_path, "--command", scripted(), "--left-seconds", "0.3") as running:
        client, other = Client(running.url).open(), Client(running.url).open()
        headers = {"mcp-session-id": client.session_id}
        with client.http.stream("GET", running.url, headers=headers) as stream:
            next(stream.iter_lines())
        running.until(lambda: running.status()["running"] == 1, "it was not ended")
        assert client.error(404, request("tools/call", {"name": "recall"})) == wording
        assert other.call("recall") == []  # this client never had a stream, so it cannot have left


def test_environment_that_does_not_read_is_ended(tmp_path, monkeypatch, wording):
    monkeypatch.setattr("buckeye.mcp.gateway.session._WRITE_SECONDS", 0.1)

    async def ask():
        runtime = CommandRuntime(["sleep", "600"], SandboxLimits())
        made = Gateway(GatewaySettings(), runtime, tmp_path)
        session = await made.open(LaunchRequest("", ()))
        body = json.dumps(request("tools/call", {"text": "x" * 2**20}, request_id=1)).encode()
        channel = await session.forward_request(parse_message(body), body)
        answer = json.loads(await channel.get(0))
        await made.close()
        return answer

    assert asyncio.run(ask())["error"]["message"] == wording


def test_session_that_starts_while_gateway_stops_is_ended(tmp_path):
    async def stop_meanwhile():
        runtime = CommandRuntime(["sleep", "600"], SandboxLimits())
        started = asyncio.Event()

        class Slow:
            name, environment_flag = "slow", "--command"

            async def prepare(self, image):
                started.set()
                await asyncio.sleep(0.2)

            async def launch(self, *given):
                return await runtime.launch(*given)

        made = Gateway(GatewaySettings(), Slow(), tmp_path)
        opening = asyncio.create_task(made.open(LaunchRequest("", ())))
        await started.wait()
        await made.close()
        with pytest.raises(GatewayError, match="stopping"):
            await opening

    asyncio.run(stop_meanwhile())
    assert list(tmp_path.iterdir()) == []


def test_folder_of_a_container_that_cannot_be_removed_is_removed(tmp_path, caplog):
    class Stuck:
        name, environment_flag = "stuck", "--command"

        async def prepare(self, image):
            pass

        async def launch(self, *given):
            async def remove():
                raise subprocess.TimeoutExpired("docker", 60)

            launch = await CommandRuntime(["sleep", "600"], SandboxLimits()).launch(*given)
            return replace(launch, on_exit=remove)

    async def open_and_close():
        made = Gateway(GatewaySettings(), Stuck(), tmp_path)
        await made.open(LaunchRequest("", ()))
        await made.close()

    asyncio.run(open_and_close())
    assert list(tmp_path.iterdir()) == []
    assert "docker" in caplog.text


def test_client_that_disconnects_before_its_stream_starts_leaves_the_session(tmp_path):
    async def disconnect():
        runtime = CommandRuntime(["sleep", "600"], SandboxLimits())
        made = Gateway(GatewaySettings(), runtime, tmp_path)
        session = await made.open(LaunchRequest("", ()))
        headers = [(b"mcp-session-id", session.id.encode()), (b"host", b"127.0.0.1")]
        scope = {"type": "http", "method": "GET", "path": "/mcp", "headers": headers, "query_string": b""}

        async def receive():
            return {"type": "http.disconnect"}

        async def send(_):
            await asyncio.sleep(0)

        await create_app(made)(scope, receive, send)
        in_use, left = session.in_use, session.disconnected_at
        await made.close()
        return in_use, left is not None

    assert asyncio.run(disconnect()) == (False, True)


@pytest.mark.parametrize("is_full", [True, False])
def test_session_on_a_full_disk_is_an_error_with_reason(tmp_path, is_full):
    """The image of a session is prepared once."""
    prepared = []

    class Images:
        name, environment_flag = "images", ""

        async def prepare(self, image):
            prepared.append(image)

        async def launch(self, *given):
            if is_full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return await CommandRuntime(["sleep", "600"], SandboxLimits()).launch(*given)

    async def ask():
        made = Gateway(GatewaySettings(), Images(), tmp_path)
        try:
            await made.open(LaunchRequest("org/env:1", ()))
        finally:
            await made.close()

    if is_full:
        with pytest.raises(GatewayError, match=os.strerror(errno.ENOSPC)) as failed:
            asyncio.run(ask())
        assert failed.value.status == 502
    else:
        asyncio.run(ask())
    assert prepared == ["org/env:1"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("behaviour", "seconds"), [("hang", "1"), ("die", "120")])
def test_environment_that_does_not_start_is_error_with_reason(tmp_path, behaviour, seconds, wording):
    with gateway(tmp_path, "--command", scripted(behaviour), "--start-seconds", seconds) as running:
        assert Client(running.url).error(502) == wording
        running.until(lambda: running.status()["running"] == 0, "it is still there")


def test_session_that_does_not_start_is_logged_once(tmp_path):
    (tmp_path / "script.sh").write_text("exit 3\n")
    files = str(tmp_path / "script.sh")
    with gateway(tmp_path, "--command", scripted(), "--files", files) as running:
        Client(running.url).error(502)
        (line,) = [line for line in running.log().splitlines() if "script.sh failed" in line]
        assert "Session not started" in line
        assert "WARNING" not in running.log()


def test_environment_that_floods_is_ended(served, wording):
    client = Client(served.url).open()
    assert client.error(502, request("tools/call", {"name": "flood"})) == wording
    assert Client(served.url).open().call("recall") == []  # other sessions are not affected


def test_session_folders_are_separate_copies_of_files(tmp_path):
    files = tmp_path / "files"
    files.mkdir()
    (files / "note.txt").write_text("as given")
    with gateway(tmp_path, "--command", scripted(), "--files", str(files)) as running:
        one, other = Client(running.url).open(), Client(running.url).open()
        assert one.call("read", path="note.txt") == "as given"
        one.call("write", path="note.txt", text="changed")
        assert other.call("read", path="note.txt") == "as given"
        assert one.call("read", path="note.txt") == "changed"
        places = [client.call("environment") for client in (one, other)]
        for name in ("HOME", "TMPDIR", "XDG_DATA_HOME"):
            assert len({seen[name] for seen in places}) == 2
        where = Path(one.call("who")["cwd"])
        one.close()
        running.until(lambda: not where.exists(), "the folder of a session that has ended is still there")
    assert (files / "note.txt").read_text() == "as given"
