"""Malformed requests are refused with the name of the wrong field."""

import asyncio
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from buckeye.workers.proxy.app import MAX_BODY_BYTES, WireApp
from buckeye.workers.proxy.endpoint import Limits, Usage
from buckeye.workers.proxy.rollout import ProxyRollout

from .players import letters

ASK = [{"role": "user", "content": "a"}]
CHAT, TEXT, RESPONSES, MESSAGES, GENERATE = (
    "v1/chat/completions",
    "v1/completions",
    "v1/responses",
    "v1/messages",
    "inference/v1/generate",
)


def post(route, body, *, headers=()):
    """Return the status and the JSON of the application's answer to a body."""

    async def play():
        rollout = ProxyRollout(
            letters(), model="policy", limits=Limits(), usage=Usage(), on_ignored_setting=lambda setting: None
        )
        app = WireApp()
        app.open(rollout)
        sent = []
        parts = [{"type": "http.request", "body": body}]

        async def receive():
            if not parts:
                await asyncio.Event().wait()  # the client stays connected
            return parts.pop()

        async def send(message):
            sent.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": f"/rollouts/{rollout.id}/{route}",
            "headers": [(b"x-api-key", rollout.key.encode()), *headers],
        }
        await app(scope, receive, send)
        await app.close(rollout)
        return sent[0]["status"], sent[1]["body"], rollout.usage

    return asyncio.run(play())


@pytest.mark.parametrize(
    ("route", "body", "named"),
    [
        (CHAT, {}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "wizard"}]}, "$.messages[0].role"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "$.messages[0].content"),
        (CHAT, {"messages": ASK, "max_tokens": 0}, "$.max_tokens"),
        (CHAT, {"messages": ASK, "response_format": {"type": "json_object"}}, "response_format"),
        (CHAT, {"messages": ASK, "tool_choice": "required"}, "tool_choice"),
        (CHAT, {"messages": ASK, "n": "two"}, "$.n"),
        (CHAT, {"messages": ASK, "trained": "no"}, "trained"),
        (CHAT, [], "object"),
        (TEXT, {}, "prompt"),
        (TEXT, {"prompt": ["a", "b"]}, "prompt"),
        (TEXT, {"prompt": [[[1]]]}, "prompt"),
        (TEXT, {"prompt": "a", "echo": True}, "echo"),
        (TEXT, {"prompt": [2**70]}, "vocabulary"),
        (RESPONSES, {}, "input"),
        (RESPONSES, {"input": [{"type": "web_search_call"}]}, "$.input[0]"),
        (RESPONSES, {"input": "a", "previous_response_id": "resp_x"}, "previous_response_id"),
        (RESPONSES, {"input": "a", "tools": [{"type": "web_search"}]}, "$.tools[0]"),
        (RESPONSES, {"input": "a", "text": {"format": {"type": "json_schema"}}}, "text"),
        (MESSAGES, {"messages": ASK}, "max_tokens"),
        (MESSAGES, {"messages": ASK, "max_tokens": 3, "tool_choice": {"type": "any"}}, "tool_choice"),
        (
            MESSAGES,
            {"max_tokens": 3, "messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "$.messages[0].content[0]",
        ),
        (GENERATE, {"token_ids": [1]}, "sampling_params"),
        (GENERATE, {"token_ids": [], "sampling_params": {}}, "no tokens"),
        (GENERATE, {"token_ids": [-1], "sampling_params": {}}, "$.token_ids"),
    ],
)
def test_the_field_that_is_wrong_is_named(route, body, named):
    status, answer, usage = post(route, json.dumps(body).encode())
    error = json.loads(answer)["error"]
    assert 400 <= status < 500
    assert named in error["message"]
    assert (json.loads(answer).get("type") == "error") == (route == MESSAGES)
    assert (usage.turns, usage.failure) == (0, None)


def test_a_body_that_is_too_large_is_refused_before_it_is_read():
    length = (b"content-length", str(MAX_BODY_BYTES + 1).encode())
    assert post(CHAT, b"{}", headers=[length])[0] == 413


NAMES = st.sampled_from(
    [
        *("messages", "prompt", "input", "token_ids", "sampling_params", "max_tokens", "max_output_tokens"),
        *("stop", "n", "tools", "tool_choice", "logprobs", "stream", "system", "role", "content", "type"),
        *("text", "stream_options", "previous_response_id", "instructions"),
    ]
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.sampled_from(["user", "assistant", "tool", "text", "message", "function", "tool_use", "auto"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=10,
)
ROUTES = st.sampled_from([CHAT, TEXT, RESPONSES, MESSAGES, GENERATE])
WHOLE = st.fixed_dictionaries(
    {},
    optional={
        "messages": st.just(ASK) | JSON,
        "prompt": st.just("a") | JSON,
        "input": st.just("a") | JSON,
        "token_ids": st.lists(st.integers(-1, 200), max_size=3) | JSON,
        "sampling_params": st.just({}) | JSON,
        "max_tokens": st.integers(-1, 9) | JSON,
        "tools": JSON,
        "tool_choice": JSON,
        "stop": st.text(max_size=2) | JSON,
        "n": st.integers(0, 3) | JSON,
        "stream": st.booleans(),
        "logprobs": st.booleans() | JSON,
    },
)


BODIES = (WHOLE | JSON).map(lambda value: json.dumps(value).encode()) | st.binary(max_size=20)


def check(route, body):
    status, answer, usage = post(route, body)
    assert status == 200 or 400 <= status < 500
    assert usage.failure is None
    if status != 200:
        assert json.loads(answer)["error"]["message"]


@settings(suppress_health_check=list(HealthCheck))
@given(route=ROUTES, body=BODIES)
def test_anything_is_answered_or_refused(route, body):
    check(route, body)


@pytest.mark.slow
@pytest.mark.parametrize("route", [CHAT, TEXT, RESPONSES, MESSAGES, GENERATE])
@settings(max_examples=4_000, suppress_health_check=list(HealthCheck))
@given(body=BODIES)
def test_any_bytes_are_answered_or_refused(route, body):
    check(route, body)
