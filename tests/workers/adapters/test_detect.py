"""Choice of the adapter in an interpreter without `verifiers`, and of the form of requests."""

import asyncio
import sys
from types import SimpleNamespace

import pytest

from buckeye.workers.worker_side.adapters import AdapterError, load
from buckeye.workers.worker_side.adapters.model import ModelError, post


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch, tmp_path):
    """Restore what loading changes in its process, which usually is a worker."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(sys, "modules", dict(sys.modules))


NO_LOADER = "answer = 42"
TASKSET = "__all__ = ['TheirTaskset']"


@pytest.mark.parametrize(
    ("path", "source", "env_id", "context"),
    [
        ("their_taskset.py", TASKSET, "their_taskset.py", {}),
        ("some-env/src/some_env/__init__.py", NO_LOADER, "some-env", {}),
        ("broken_env.py", "raise RuntimeError('no data')", "broken_env.py", {}),
        ("empty/notes", "", "empty", {}),
        ("inner_name.py", TASKSET, "owner/outer-name", {"module": "inner_name"}),
        (None, "", "owner/no-such-env@1.2.0", {}),
        (None, "", "reasoning-gym/chain_sum", {}),
        (None, "", "textarena/GuessTheNumber-v0", {}),
        (None, "", "ors-sdk/ors_games:Guess", {}),
        (None, "", "hud/hud_games", {}),
        (None, "", "bfcl-eval/simple_python", {}),
        (None, "", "bfcl-eval/multi_turn_base", {}),
        (None, "", "bfcl-eval/web_search_base", {}),
    ],
)
def test_unloadable_environment_is_refused(tmp_path, monkeypatch, refusal, path, source, env_id, context):
    monkeypatch.syspath_prepend(str(tmp_path))
    if path is not None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(source)
    with refusal(AdapterError):
        load(str(tmp_path / env_id) if path and not context else env_id, {}, context)


def test_a_misspelt_dataset_gets_the_likely_one(monkeypatch, refusal):
    factory = SimpleNamespace(DATASETS={"chain_sum": (None, None), "gcd": (None, None)})
    utils = SimpleNamespace(extract_answer=None)
    monkeypatch.setitem(sys.modules, "reasoning_gym", SimpleNamespace(factory=factory, utils=utils))
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", factory)
    monkeypatch.setitem(sys.modules, "reasoning_gym.utils", utils)
    with refusal(AdapterError):
        load("reasoning-gym/chain_summ", {}, {})


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n" + b'{"a": "b"}', {"a": "b"}),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
            + b'4\r\n{"a"\r\n6;x=y\r\n: "b"}\r\n0\r\n\r\n',
            {"a": "b"},
        ),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + b'{"a": "b"}', {"a": "b"}),
        (b"HTTP/1.1 400 Bad\r\nContent-Length: 3\r\n\r\nwhy", "HTTP 400: why"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nwhy", "is not JSON"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n[]", "no response from"),
        (b"nonsense\r\n\r\n", "no response from"),
    ],
)
def test_post_parses_http_responses(answer, expected):
    heard = []

    async def talk():
        async def serve(reader, writer):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            heard.append((head, await reader.readexactly(2)))
            writer.write(answer)
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            return await post(f"http://127.0.0.1:{port}/v1/chat", {}, key="secret")

    if isinstance(expected, dict):
        assert asyncio.run(talk()) == expected
    else:
        with pytest.raises(ModelError, match=expected):
            asyncio.run(talk())
    ((head, body),) = heard
    assert head.startswith("POST /v1/chat HTTP/1.1\r\n")
    assert "Authorization: Bearer secret\r\n" in head
    assert body == b"{}"
