"""Which adapter an environment gets in an interpreter without `verifiers`, and how the model is asked."""

import asyncio
import sys
from types import SimpleNamespace

import pytest

from buckeye.workers.worker_side.adapters import AdapterError, load
from buckeye.workers.worker_side.adapters.model import ModelError, post


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch, tmp_path):
    """Loading changes the paths of its process, which usually is a worker."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(sys, "modules", dict(sys.modules))


def refusal(env_id, **context):
    with pytest.raises(AdapterError) as caught:
        load(str(env_id), {}, context)
    return str(caught.value)


def test_a_taskset_says_what_it_needs(tmp_path):
    (tmp_path / "their_taskset.py").write_text("__all__ = ['TheirTaskset']")
    said = refusal(tmp_path / "their_taskset.py")
    assert "is made for verifiers-v1, and verifiers is not installed" in said
    assert "'verifiers>=0.4,<0.5'" in said


def test_a_module_without_an_environment(tmp_path):
    project = tmp_path / "some-env"
    (project / "src" / "some_env").mkdir(parents=True)
    (project / "src" / "some_env" / "__init__.py").write_text("answer = 42")
    said = refusal(project)
    assert "no load_environment (verifiers v0) and names no Taskset in __all__ (verifiers v1)" in said


def test_a_misspelt_dataset_gets_the_likely_one(monkeypatch):
    factory = SimpleNamespace(DATASETS={"chain_sum": (None, None), "gcd": (None, None)})
    utils = SimpleNamespace(extract_answer=None)
    monkeypatch.setitem(sys.modules, "reasoning_gym", SimpleNamespace(factory=factory, utils=utils))
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", factory)
    monkeypatch.setitem(sys.modules, "reasoning_gym.utils", utils)
    said = refusal("reasoning-gym/chain_summ")
    assert "has no dataset 'chain_summ'. Did you mean 'chain_sum'? It has: chain_sum, gcd." in said


def test_what_is_not_there(tmp_path):
    assert f"needs the module 'no_such_env', which {sys.executable} does not have" in refusal(
        "owner/no-such-env@1.2.0"
    )
    assert "needs the module 'reasoning_gym'" in refusal("reasoning-gym/chain_sum")
    assert "needs the module 'textarena'" in refusal("textarena/GuessTheNumber-v0")
    (tmp_path / "empty").mkdir()
    assert "has no module empty: looked for empty.py and empty/" in refusal(tmp_path / "empty")


def test_a_module_that_cannot_be_imported(tmp_path):
    (tmp_path / "broken_env.py").write_text("raise RuntimeError('no data')")
    assert "could not be imported: RuntimeError: no data" in refusal(tmp_path / "broken_env.py")


def test_a_module_may_have_another_name(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "inner_name.py").write_text("__all__ = ['InnerTaskset']")
    assert "is made for verifiers-v1" in refusal("owner/outer-name", module="inner_name")


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
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n[]", "no answer from"),
        (b"nonsense\r\n\r\n", "no answer from"),
    ],
)
def test_asking_by_http(answer, expected):
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
