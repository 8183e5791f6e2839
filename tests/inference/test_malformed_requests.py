"""Malformed requests: each is refused or answered, and none breaks the server or leaks resources."""

import json
import socket

import httpx
import psutil
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.waiting import HANG

from .conftest import KEY_OF_SERVERS, Server
from .test_protocol import JSON
from .test_server import generate, metric, wait_for

pytestmark = pytest.mark.e2e

FAST, ALL = 100, 10_000
RAW_EVERY = 20
MAX_GROWTH_MB = 40
PAUSING = ("/pause", "/sleep", "/release_kv_cache_memory")
SAMPLING = ("/v1/chat/completions", "/v1/completions", "/inference/v1/generate")

JUNK = st.one_of(
    JSON,
    st.sampled_from(["", "\ud83d\ude00", "\x00", "{{ x }}", "{% for %}", "<|im_end|>", "../../etc/passwd"]),
    st.sampled_from([2**63, 2**64, -(2**63) - 1, 10**400, -1, 0, 1.5, 1e308, -0.0]),
    st.integers(1, 400).map(lambda depth: _nested(depth)),
    st.integers(1, 3000).map(lambda length: ["a"] * length),
)
METHODS = st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "BREW"])
HEADERS = st.dictionaries(
    st.sampled_from(["content-type", "authorization", "accept", "x-request-id", "cookie", "expect"]),
    st.sampled_from(["", "text/plain", "application/json; charset=utf-7", "Bearer x", "a" * 5000, "\xff"]),
    max_size=2,
)
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
RAW = st.one_of(
    st.binary(max_size=200),
    st.sampled_from(
        [
            POST + b"Content-Length: ten\r\n\r\n",
            POST + b"Content-Length: -5\r\n\r\n",
            POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
            POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
            POST + b"Transfer-Encoding: gzip\r\n\r\n{}",
            POST + b"Content-Length: 500\r\n\r\n{",
            b"POST /v1/completions HTTP/9.9\r\n\r\n",
            b"GET " + b"/a" * 40_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            + b"X: y\r\n" * 5000
            + b"\r\n",
            b"GET /\x00 HTTP/1.1\r\n\r\n",
            b"GET /%ff%00%2e%2e/ HTTP/1.1\r\nHost: x\r\n\r\n",
        ]
    ),
)


def _nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
GOOD = {
    "/v1/chat/completions": {"messages": MESSAGES, "tools": [TOOL], "max_tokens": 3, "stream": True, "n": 2},
    "/v1/completions": {"prompt": [[1, 2], [3]], "max_tokens": 3, "logprobs": 2, "stop": ["a"], "seed": 1},
    "/inference/v1/generate": {"token_ids": [1, 2], "sampling_params": {"max_tokens": 3, "top_k": 5}},
    "/tokenize": {"messages": MESSAGES, "tools": [TOOL]},
    "/detokenize": {"tokens": [1, 2]},
    "/abort_requests": {"request_ids": ["a"]},
    "/update_weights": {"update_info": {"path": "x"}},
    "/finish_weight_update": {"weight_version": "1"},
    "/update_weight_version": {"new_version": 1},
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "x"},
    "/v1/unload_lora_adapter": {"lora_name": "a"},
}
"""Valid bodies of requests that are answered immediately."""


@st.composite
def requests(draw, document):
    """Draw (method, path, headers, body) of a request that is usually malformed."""
    operations = [(method.upper(), path) for path, methods in document["paths"].items() for method in methods]
    sampling = [operation for operation in operations if operation[1] in SAMPLING]
    method, path = draw(st.sampled_from(operations + 8 * sampling))  # about half of all requests
    body = _spoilt(draw, draw(JUNK) if path not in GOOD else GOOD[path], document)
    if "{" in path:
        path = path.partition("{")[0] + draw(st.sampled_from(["", "x", "%2e%2e", "a/b", "%00", "é"]))
    if draw(st.integers(0, 9)) == 0:
        path += draw(st.sampled_from(["/", "x", "//", "?x=1", "?mode=later", "%00"]))
    if draw(st.integers(0, 9)) == 0:
        method = draw(METHODS)
    return method, path, draw(HEADERS), body


def _spoilt(draw, body, document):
    how = draw(st.integers(0, 5))
    if isinstance(body, dict) and how <= 3:
        schemas = document["components"]["schemas"].values()
        known = sorted({name for schema in schemas for name in schema.get("properties", {})})
        name = (
            st.sampled_from(sorted(body))
            if how <= 1 and body
            else st.sampled_from(known) | st.text(max_size=6)
        )
        body = {**body, draw(name): draw(JUNK)}
    encoded = json.dumps(body, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")
    if how == 4:
        cut = draw(st.integers(0, len(encoded)))
        encoded = encoded[:cut] + draw(st.binary(max_size=4)) + encoded[cut + draw(st.integers(0, 3)) :]
    return encoded


@pytest.fixture(scope="module")
def hardened(chat_model, tmp_path_factory):
    """Separate server, because these requests may pause it and rename its weights."""
    with Server(chat_model.directory, tmp_path_factory.mktemp("malformed"), max_num_seqs=8) as running:
        yield running


@pytest.mark.parametrize("count", [FAST, pytest.param(ALL, marks=[pytest.mark.slow])])
def test_malformed_requests_are_refused_and_leave_nothing_behind(hardened, count):
    process = psutil.Process(hardened.process.pid)
    with hardened.http() as http:
        document = http.get("/openapi.json").json()
        counts: dict[int, int] = {}
        before = None

        @settings(
            max_examples=count,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(request=requests(document), raw=RAW)
        def send(request, raw):
            nonlocal before
            method, path, headers, body = request
            status = _status(http, method, path, headers, body)
            counts[status] = counts.get(status, 0) + 1
            assert status in (200, 400, 401, 404, 405, 411, 413, 415, 417), (status, request)
            number = sum(counts.values())
            if number % RAW_EVERY == 0:
                _send_raw(hardened.port, raw)
            if method == "POST" and path.startswith(PAUSING):
                http.post("/wake_up")
                http.post("/resume")
            if number == count // 4:  # caches and pools have reached their size by now
                before = process.memory_info().rss, process.num_fds()

        send()
        http.post("/resume")
        wait_for(lambda: metric(http, "vllm:num_requests_running") == 0)
        wait_for(lambda: metric(http, "vllm:num_requests_waiting") == 0)
        assert metric(http, "vllm:kv_cache_usage_perc") == 0
        refused = sum(number for status, number in counts.items() if status >= 400)
        assert refused > sum(counts.values()) / 3, counts
        assert counts.get(200, 0) > 0, counts  # some are well-formed: the server does not refuse everything
        rss, files = before
        assert process.memory_info().rss - rss < MAX_GROWTH_MB * 2**20, counts
        assert process.num_fds() <= files + 5
        assert len(generate(http)[0]["token_ids"]) == 12
    assert hardened.process.poll() is None
    log = hardened.log.read_text()
    assert "Traceback" not in log, log[log.index("Traceback") - 500 :][:3000]


def _status(http, method, path, headers, body):
    headers = {"content-type": "application/json", **headers}
    try:
        request = http.build_request(
            method,
            path,
            content=body,
            headers=[(k.encode(), v.encode("latin-1")) for k, v in headers.items()],
        )
    except (httpx.InvalidURL, ValueError):
        return 400  # this client cannot send such a request; raw sockets send worse ones
    with_stream = http.send(request, stream=True)
    try:
        with_stream.read()
    finally:
        with_stream.close()
    if with_stream.status_code >= 400 and method != "HEAD":
        shown = with_stream.text
        assert (
            with_stream.headers["content-type"] != "application/json" or json.loads(shown)["error"]["message"]
        )
    return with_stream.status_code


@pytest.mark.parametrize("key", ["", f"Authorization: Bearer {KEY_OF_SERVERS}\r\n"])
def test_request_followed_by_invalid_http_gets_one_reply(hardened, key):
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{key}Content-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", hardened.port), timeout=HANG) as raw:
        raw.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\nno number\r\n".encode())
        answer = b"".join(iter(lambda: raw.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 400")
    assert answer.count(b"HTTP/1.1") == 1
    assert "Traceback" not in hardened.log.read_text()


def _send_raw(port, data):
    """Send bytes on a socket; assert that the server answers 4xx or 200, hangs up, or waits for more."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as raw:
        raw.settimeout(0.2)
        try:
            raw.sendall(data)
            answer = raw.recv(200)
        except (TimeoutError, ConnectionError):
            return
        if answer:
            assert answer.startswith((b"HTTP/1.1 4", b"HTTP/1.1 200")), answer
