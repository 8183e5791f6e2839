"""What the server says of itself, its limits, its key, and how it starts and ends."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from buckeye.errors import RunError
from buckeye.launch.serve import served_model
from tests.command import run_here

from .conftest import KEY_VARIABLE, Server
from .test_server import IDS, generate, metric, post, wait_for

JSON = {"content-type": "application/json"}


def test_the_server_describes_itself(http):
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


@pytest.mark.parametrize("asking", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_server_of_ones_own_that_dies_ends_the_block(chat_model, asking):
    """At once, with how it ended: neither a request nor anything else is waited for."""

    async def use():
        async with served_model(chat_model.directory) as server:
            (launched,) = (p for p in psutil.Process().children() if "buckeye-serve-" in str(p.cmdline()))
            launched.kill()
            if asking:
                await server.chat([{"role": "user", "content": "fox"}], temperature=1.0, max_tokens=100)
            await asyncio.sleep(600)

    with pytest.raises(RunError, match="Inference 0 was ended by SIGKILL"):
        asyncio.run(asyncio.wait_for(use(), 120))


@pytest.mark.slow
def test_a_block_of_ones_own_server_raises_what_it_raises(chat_model):
    async def use():
        async with served_model(chat_model.directory):
            raise ValueError("mine")

    with pytest.raises(ValueError, match=r"^mine$"):
        asyncio.run(use())


def test_a_body_over_the_limit_is_refused(http, server):
    def pieces():
        for _ in range(70):
            yield b" " * 2**20

    try:
        status = http.post("/v1/completions", content=pieces(), headers=JSON).status_code
    except httpx.TransportError:  # the server may hang up while the rest is still being sent
        status = 413
    assert status == 413
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer of the tests\r\n"
            b"Content-Type: application/json\r\nContent-Length: 1099511627776\r\n\r\n"
        )
        assert raw.recv(100).startswith(b"HTTP/1.1 413")


def test_too_much_at_a_time_is_refused_for_now(http, server):
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


def test_the_key_guards_every_route_but_health_and_the_process_ends_cleanly(qwen3, tmp_path):
    server = Server(qwen3.directory, tmp_path, key="secret", max_num_seqs=2)
    try:
        server.wait_ready()
        with httpx.Client(base_url=server.url, trust_env=False) as stranger, server.http() as friend:
            assert stranger.get("/health").status_code == 200
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
                for method, route in (
                    ("GET", "/metrics"),
                    ("POST", "/pause"),
                    ("POST", "/update_weights"),
                    ("POST", "/v1/completions"),
                    ("GET", "/nothing"),
                ):
                    refused = stranger.request(method, route, headers=headers)
                    assert refused.status_code == 401
                    assert "API key" in refused.json()["error"]["message"]
            assert friend.get("/metrics").status_code == 200
            # no tokenizer: ids in, ids out, and a reason for everything else
            answer = post(friend, "/v1/completions", prompt=IDS, return_token_ids=True, max_tokens=3)
            assert len(answer["choices"][0]["token_ids"]) == 3
            refused = friend.post(
                "/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]}
            )
            assert (refused.status_code, "tokenizer" in refused.text) == (400, True)
            # a stream that is open when the server is asked to stop gets an end
            friend.post("/pause?mode=keep")
            with friend.stream("POST", "/v1/completions", json={"prompt": IDS, "stream": True}) as stream:
                wait_for(lambda: metric(friend, "vllm:num_requests_waiting") == 1)
                assert server.stop() == 0
                assert '"finish_reason":"abort"' in stream.read().decode()
    finally:
        server.process.kill()
    log = server.log.read_text()
    assert f"Inference server ready on {server.url} (model {qwen3.directory}, " in log
    assert "2 slots" in log
    assert "secret" not in log
    assert "Inference server ready" in (tmp_path / "logs" / "run.log").read_text()


HELD = """
import pathlib, time
from buckeye.cli.main import main
from buckeye.inference.engine import decoder
from buckeye.inference.server import server

def held(*words, decode=decoder.Decoder.decode):
    while not pathlib.Path({go!r}).exists():
        time.sleep(0.02)
    return decode(*words)

decoder.Decoder.decode = held
server._DRAIN_SECONDS = 600.0
main()
"""


def test_a_server_that_is_stopped_finishes_what_it_has_begun(chat_model, tmp_path):
    """No token is made before it is asked to stop, and no limit ends it: however fast the machine is."""
    go = tmp_path / "go"
    program = ("-c", HELD.format(go=str(go)))
    server = Server(chat_model.directory, tmp_path, program=program, max_num_seqs=4)
    body = {"prompt": IDS, "max_tokens": 20, "ignore_eos": True, "n": 8, "seed": 3}
    try:
        server.wait_ready()
        with server.http() as http, server.http() as other, ThreadPoolExecutor() as pool:
            http.timeout = 600
            whole = pool.submit(http.post, "/v1/completions", json=body)
            wait_for(lambda: metric(other, "vllm:num_requests_waiting") == 4)
            with http.stream("POST", "/v1/completions", json=body | {"n": 1, "stream": True}) as stream:
                server.process.terminate()
                wait_for(lambda: other.get("/health").status_code == 503)
                refused = other.post("/v1/completions", json=body)
                assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
                assert "shutting down" in refused.json()["error"]["message"]
                go.touch()
                assert '"finish_reason":"length"' in stream.read().decode()
            assert {choice["finish_reason"] for choice in whole.result().json()["choices"]} == {"length"}
        assert server.process.wait() == 0
    finally:
        server.process.kill()
    assert "Stopping: finishing 2 requests" in server.log.read_text()


@pytest.mark.slow
def test_a_second_signal_ends_what_is_not_finished(chat_model, tmp_path):
    server = Server(chat_model.directory, tmp_path, max_num_seqs=2)
    body = {"token_ids": IDS, "sampling_params": {"max_tokens": 110, "ignore_eos": True, "n": 1024}}
    try:
        server.wait_ready()
        with server.http() as http, server.http() as other, ThreadPoolExecutor() as pool:
            long = pool.submit(http.post, "/inference/v1/generate", json=body)
            wait_for(lambda: metric(other, "vllm:num_requests_waiting") > 1000)
            server.process.terminate()
            wait_for(lambda: other.get("/health").status_code == 503)
            server.process.terminate()
            reasons = [choice["finish_reason"] for choice in long.result().json()["choices"]]
            assert "abort" in reasons
        assert server.process.wait() == 0
    finally:
        server.process.kill()


def end_here(model, folder, config):
    """Exit code and all that the server prints, if it ends at once, in this process."""
    server = {"api_key_var": KEY_VARIABLE, **config.get("server", {})}
    config = {**config, "server": server, "model": {"name": str(model.directory)}, "output_dir": str(folder)}
    (folder / "inference.json").write_text(json.dumps(config))
    done = run_here("serve", "@", "inference.json", cwd=folder)
    return done.returncode, done.stdout + done.stderr


def end_of_a_process(model, folder, config):
    server = Server(model.directory, folder, **config)
    return server.process.wait(), server.log.read_text()


@pytest.mark.parametrize("end", [end_here, pytest.param(end_of_a_process, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("config", "message", "code"),
    [
        ({"server": {"host": "0.0.0.0"}}, "a key is required", 2),
        ({"kv_cache_gb": 1e-6}, "kv_cache_gb", 1),
        ({}, "Cannot listen on 127.0.0.1:", 1),
    ],
)
def test_a_server_that_cannot_start_says_why_in_one_line(qwen3, tmp_path, end, config, message, code):
    with socket.socket() as occupant:
        occupant.bind(("127.0.0.1", 0))
        occupant.listen()
        port = {} if code == 2 else {"server": {"port": occupant.getsockname()[1]}}
        if "kv_cache_gb" in config:
            occupant.close()
        ended, said = end(qwen3, tmp_path, port | config)
    assert ended == code
    assert message in said
    assert "Traceback" not in said
