"""Server process: reported facts, limits, key, start and exit."""

import asyncio
import json
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from buckeye.base.keys import generated_key, local_key
from buckeye.errors import RunError
from buckeye.inference.engine.decoder import Decoder
from buckeye.inference.server import server as server_module
from buckeye.launch.serve import served_model
from tests.command import run_here
from tests.ports import free_port
from tests.waiting import HANG

from .conftest import KEY_VARIABLE, LocalServer, Server, near
from .test_server import IDS, generate, metric, post, publish, wait_for

JSON = {"content-type": "application/json"}


def test_openapi_document_lists_all_routes(http):
    document = http.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    chat = document["paths"]["/v1/chat/completions"]["post"]
    assert chat["summary"]
    reference = chat["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    schema = document["components"]["schemas"][reference.rpartition("/")[2]]
    assert "messages" in schema["required"]
    assert "temperature" in schema["properties"]
    for path, methods in document["paths"].items():
        for method in methods:
            answer = http.request(method, path.replace("{model}", "x"), content=b"[]", headers=JSON)
            assert answer.status_code not in (404, 405) or "{model}" in path, (method, path)
    post(http, "/resume")


def test_every_metric_is_prometheus_text(http):
    answer = http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    kinds: dict[str, str] = {}
    for line in answer.text.splitlines():
        if line.startswith("# TYPE"):
            _, _, name, kind = line.split()
            assert name not in kinds
            kinds[name] = kind
        else:
            sample = re.fullmatch(r"([a-zA-Z_:][\w:]*)(\{\w+=\"[^\"]*\"\})? (\S+)", line)
            assert sample, line
            assert kinds[sample[1]] == ("counter" if sample[1].endswith("_total") else "gauge")
            assert float(sample[3]) >= 0
    assert answer.text.endswith("\n")


@pytest.mark.e2e
def test_local_server_that_dies_ends_the_block(chat_model):
    """The block ends immediately and reports how the server exited; it waits for no request."""

    async def use():
        async with served_model(chat_model.directory) as server:
            (launched,) = (p for p in psutil.Process().children() if "buckeye-serve-" in str(p.cmdline()))
            launched.kill()
            await server.chat([{"role": "user", "content": "fox"}], temperature=1.0, max_tokens=100)

    with pytest.raises(RunError, match="SIGKILL"):
        asyncio.run(asyncio.wait_for(use(), 120))


def test_a_body_over_the_limit_is_refused(http, server):
    def pieces():
        for _ in range(70):
            yield b" " * 2**20

    try:
        status = http.post("/v1/completions", content=pieces(), headers=JSON).status_code
    except httpx.TransportError:  # the server may close the connection while the rest is being sent
        status = 413
    assert status == 413
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer of the tests\r\n"
            b"Content-Type: application/json\r\nContent-Length: 1099511627776\r\n\r\n"
        )
        assert raw.recv(100).startswith(b"HTTP/1.1 413")


def test_too_many_sequences_get_429(http, server):
    with server.http() as other, ThreadPoolExecutor(20) as pool:
        post(http, "/pause?mode=keep")
        body = {"token_ids": IDS, "sampling_params": {"n": 1024, "max_tokens": 1}}
        open_ones = [pool.submit(other.post, "/inference/v1/generate", json=body) for _ in range(16)]
        wait_for(lambda: metric(http, "vllm:num_requests_waiting") == 16 * 1024)
        refused = http.post("/inference/v1/generate", json=body)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        post(http, "/abort_requests")
        assert {one.result().status_code for one in open_ones} == {200}
        post(http, "/resume")
    assert len(generate(http)) == 1


def test_a_request_id_names_one_request(http, server):
    with server.http() as other, ThreadPoolExecutor() as pool:
        post(http, "/pause?mode=keep")
        body = {"token_ids": IDS, "sampling_params": {}, "request_id": "mine"}
        first = pool.submit(other.post, "/inference/v1/generate", json=body)
        wait_for(lambda: metric(http, "vllm:num_requests_waiting") == 1)
        refused = http.post("/inference/v1/generate", json=body)
        assert (refused.status_code, "'mine'" in refused.text) == (400, True)
        post(http, "/resume")
        assert first.result().json()["request_id"] == "mine"


def test_stopped_server_finishes_running_requests(chat_model, tmp_path, monkeypatch):
    """No token is sampled before the stop, and no limit ends the request: machine speed does not matter."""
    go, decode = threading.Event(), Decoder.decode
    monkeypatch.setattr(Decoder, "decode", lambda *arguments: go.wait(HANG) and decode(*arguments))
    monkeypatch.setattr(server_module, "_DRAIN_SECONDS", HANG)
    body = {"prompt": IDS, "max_tokens": 20, "ignore_eos": True, "n": 8, "seed": 3}
    with (
        LocalServer(chat_model.directory, tmp_path, max_num_seqs=4) as server,
        server.http() as http,
        server.http() as other,
        ThreadPoolExecutor() as pool,
    ):
        whole = pool.submit(http.post, "/v1/completions", json=body)
        wait_for(lambda: metric(other, "vllm:num_requests_waiting") == 4)
        with http.stream("POST", "/v1/completions", json=body | {"n": 1, "stream": True}) as stream:
            server.drain()
            wait_for(lambda: other.get("/health").status_code == 503)
            refused = other.post("/v1/completions", json=body)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            go.set()
            assert '"finish_reason":"length"' in stream.read().decode()
        assert {choice["finish_reason"] for choice in whole.result().json()["choices"]} == {"length"}


def test_second_signal_aborts_running_requests(chat_model, tmp_path):
    body = {"token_ids": IDS, "sampling_params": {"max_tokens": 110, "ignore_eos": True, "n": 1024}}
    with (
        LocalServer(chat_model.directory, tmp_path, max_num_seqs=2) as server,
        server.http() as http,
        server.http() as other,
        ThreadPoolExecutor() as pool,
    ):
        long = pool.submit(http.post, "/inference/v1/generate", json=body)
        wait_for(lambda: metric(other, "vllm:num_requests_waiting") > 1000)
        server.drain()
        wait_for(lambda: other.get("/health").status_code == 503)
        server.drain()
        assert "abort" in {choice["finish_reason"] for choice in long.result().json()["choices"]}


@pytest.mark.parametrize(
    ("config", "code"),
    [({"server": {"host": "0.0.0.0"}}, 2), ({"kv_cache_gb": 1e-6}, 1), ({}, 1)],
    ids=["without a key", "without memory", "without a port"],
)
def test_server_that_cannot_start_prints_one_error(qwen3, tmp_path, config, code, wording):
    with socket.socket() as occupant:
        occupant.bind(("127.0.0.1", 0))
        occupant.listen()
        port = free_port() if config else occupant.getsockname()[1]
        server = {"api_key_var": KEY_VARIABLE, "port": port, **config.get("server", {})}
        config = config | {"server": server, "model": {"name": str(qwen3.directory)}, "output_dir": "run"}
        (tmp_path / "inference.json").write_text(json.dumps(config))
        done = run_here("serve", "@", "inference.json", cwd=tmp_path)
    assert done.returncode == code
    said = (done.stdout + done.stderr).splitlines()
    assert [line for line in said if " INFO " not in line] == wording


def test_failed_start_on_a_busy_port_keeps_the_key_of_the_running_server(qwen3, tmp_path):
    with socket.socket() as occupant:
        occupant.bind(("127.0.0.1", 0))
        occupant.listen()
        port = occupant.getsockname()[1]
        with generated_key(KEY_VARIABLE, port) as key:
            flags = ("--server.port", port, "--server.api-key-var", KEY_VARIABLE, "--output-dir", tmp_path)
            done = run_here("serve", "--model.name", qwen3.directory, *flags, cwd=tmp_path)
            assert "BK-PORT-TAKEN" in done.stderr
            assert local_key(KEY_VARIABLE, f"http://127.0.0.1:{port}") == key


@pytest.mark.e2e
def test_a_server_takes_new_weights_and_ends_cleanly(qwen3, make_model, tmp_path):
    """The model has no tokenizer: ids in, ids out. A stream that is open at the stop gets a final event."""
    new = make_model("qwen3", seed=3)
    path = publish(new, tmp_path, 7)
    with (
        Server(qwen3.directory, tmp_path / "run", weights_dir=str(tmp_path), max_num_seqs=2) as server,
        server.http() as http,
    ):
        refused = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
        assert (refused.status_code, "tokenizer" in refused.text) == (400, True)
        post(http, "/start_weight_update")
        post(http, "/update_weights", update_info={"path": str(path)})
        assert generate(http)[0]["weight_versions"][0]["version"] == "0"  # the version has not changed yet
        post(http, "/finish_weight_update", weight_version="7")
        assert metric(http, "buckeye:weight_version") == 7
        choice = generate(http)[0]
        assert choice["weight_versions"] == [{"version": "7", "start": 0, "end": 12}]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert logprobs == near(new.logprobs(IDS, choice["token_ids"]).tolist())
        post(http, "/pause?mode=keep")
        with http.stream("POST", "/v1/completions", json={"prompt": IDS, "stream": True}) as stream:
            wait_for(lambda: metric(http, "vllm:num_requests_waiting") == 1)
            assert server.stop() == 0
            assert '"finish_reason":"abort"' in stream.read().decode()
    assert "2 slots" in (tmp_path / "run" / "logs" / "run.log").read_text()
    assert server.key not in server.log.read_text()
