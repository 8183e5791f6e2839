"""Requests that a server accepts, as a table."""

from __future__ import annotations

import socket

import pytest

from buckeye.base.request_gate import AccessRules, find_denial

LOCAL = AccessRules(host="127.0.0.1", key="secret")
OPEN_TO_OTHERS = AccessRules(host="0.0.0.0", key="secret", hosts=("gpu.example",))
WITH_KEY = {"authorization": "Bearer secret"}


def status(rules, path="/v1/models", **headers):
    header_list = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    denial = find_denial({"path": path, "headers": header_list, "scheme": "http"}, rules)
    return None if denial is None else denial.status


@pytest.mark.parametrize(
    ("rules", "host", "expected"),
    [
        (LOCAL, "localhost", None),
        (LOCAL, "localhost.", None),
        (LOCAL, "127.8.9.1:5", None),
        (LOCAL, "[::1]:5", None),
        (LOCAL, "10.0.0.1", 403),
        (LOCAL, "evil.example", 403),
        (LOCAL, "localhost@evil.example", 403),
        (LOCAL, "evil.example#localhost", 403),
        (LOCAL, "", 403),
        (LOCAL, "[", 403),
        (OPEN_TO_OTHERS, "10.0.0.1:8000", None),
        (OPEN_TO_OTHERS, "gpu.example", None),
        (OPEN_TO_OTHERS, socket.gethostname(), None),
        (OPEN_TO_OTHERS, "evil.example", 403),
    ],
)
def test_host_header_must_name_the_server(rules, host, expected):
    assert status(rules, host=host, **WITH_KEY) == expected


def test_request_without_host_or_with_two_hosts_is_refused():
    assert status(LOCAL, **WITH_KEY) == 403
    two = [(b"host", b"localhost"), (b"host", b"evil.example"), (b"authorization", b"Bearer secret")]
    assert find_denial({"path": "/", "headers": two}, LOCAL).reason == "host"


@pytest.mark.parametrize(
    ("authorization", "expected"),
    [
        ("Bearer secret", None),
        ("bearer  secret ", None),
        ("Bearer Secret", 401),
        ("Bearer secre", 401),
        ("Basic secret", 401),
        ("secret", 401),
        ("", 401),
    ],
)
def test_key_is_required_except_for_health(authorization, expected):
    assert status(LOCAL, host="localhost", authorization=authorization) == expected
    assert status(LOCAL, "/health", host="localhost", authorization=authorization) is None


def test_only_the_own_origin_is_allowed():
    own = {"host": "localhost:9", **WITH_KEY}
    assert status(LOCAL, origin="http://localhost:9", **own) is None
    assert status(LOCAL, origin="http://localhost:8", **own) == 403
    assert status(LOCAL, origin="https://localhost:9", **own) == 403


def test_without_a_key_only_public_paths_are_served():
    rules = AccessRules(host="127.0.0.1", key=None, public=("/v1/models",))
    paths = {"/v1/models": None, "/v1/models/a/b": None, "/v1/modelsx": 403, "/pause": 403, "/health": None}
    assert {path: status(rules, path, host="localhost") for path in paths} == paths


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"content_length": "2", "content_type": "application/json"}, None),
        ({"content_length": "2", "content_type": "Application/JSON; charset=utf-8"}, None),
        ({"content_length": "2", "content_type": "text/plain"}, 415),
        ({"content_length": "2"}, 415),
        ({"transfer_encoding": "chunked"}, 415),
        ({"content_length": "0"}, None),
        ({}, None),
    ],
)
def test_body_must_be_json(headers, expected):
    assert status(LOCAL, host="localhost", **WITH_KEY, **headers) == expected
