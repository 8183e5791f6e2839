"""Sampled tokens as arrays, and turns that send only their new tokens."""

import asyncio
import json
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buckeye.inference.client import InferenceClient, SamplingParams
from buckeye.inference.client.http import Connections
from buckeye.inference.types import (
    ARRAYS_TYPE,
    KeptPrompts,
    Prefix,
    VersionSpan,
    parse_generations,
    sampled_arrays,
)
from buckeye.inference.vllm.server import PLUGIN
from tests.waiting import HANG

from .conftest import KEY_OF_SERVERS

ROUTE = "/inference/v1/generate"
ACCEPT = {"accept": f"{ARRAYS_TYPE}, application/json"}
IDS = list(range(40, 110))
PARAMS = SamplingParams(max_tokens=6, seed=3)
SPANS = [VersionSpan("default", 0, 1), VersionSpan("7", 1, 3)]
CHOICE = {
    "index": 0,
    "token_ids": [5, 6, 7],
    "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -1.25}, {"logprob": 0.0}]},
    "weight_versions": [{"version": "default", "start": 0, "end": 1}, {"version": "7", "start": 1, "end": 3}],
    "finish_reason": "stop",
}


def request(ids=IDS, **fields):
    return {"token_ids": ids, "sampling_params": {"max_tokens": 6, "seed": 3, "logprobs": 0}, **fields}


@pytest.mark.parametrize(
    ("route", "body"),
    [
        (ROUTE, request()),
        (
            "/v1/completions",
            {
                "prompt": [IDS, IDS[:9]],
                "max_tokens": 6,
                "seed": 3,
                "logprobs": 0,
                "return_token_ids": True,
                "return_weight_versions": True,
            },
        ),
    ],
)
def test_arrays_have_the_tokens_of_the_json(http, route, body):
    plain, arrays = http.post(route, json=body), http.post(route, json=body, headers=ACCEPT)
    assert plain.headers["content-type"] == "application/json"
    assert arrays.headers["content-type"] == ARRAYS_TYPE
    generations = parse_generations(arrays.content, ARRAYS_TYPE)
    assert generations == parse_generations(plain.content)
    assert [len(generation.token_ids) for generation in generations] == [6] * len(generations)


@pytest.mark.parametrize("asks", [{"logprobs": 2}, {"logprobs": None}])
def test_a_request_for_more_than_arrays_have_gets_json(http, asks):
    body = request()
    body["sampling_params"] |= asks
    assert http.post(ROUTE, json=body, headers=ACCEPT).headers["content-type"] == "application/json"


def test_a_prefix_stands_for_the_tokens_of_an_earlier_request(http):
    first = http.post(ROUTE, json=request(request_id="first"), headers=ACCEPT)
    sampled = parse_generations(first.content, ARRAYS_TYPE)[0].token_ids
    whole = [*IDS, *sampled, 8, 9]
    for kept in (len(IDS) + 6, 71, 3):
        prefix = {"request_id": "first", "tokens": kept}
        later = http.post(ROUTE, json=request(whole[kept:], prefix=prefix), headers=ACCEPT)
        assert later.status_code == 200
        expected = http.post(ROUTE, json=request(whole), headers=ACCEPT)
        assert later.content == expected.content


@pytest.mark.parametrize(
    ("prefix", "status"),
    [
        ({"request_id": "unknown", "tokens": 3}, 410),
        ({"request_id": "kept", "tokens": 77}, 410),
        ({"request_id": "kept", "tokens": 0}, 400),
        ({"request_id": "kept", "tokens": -1}, 400),
        ({"request_id": "kept"}, 400),
        ({"request_id": "kept", "tokens": 76}, 400),  # the prompt would have too many tokens
    ],
)
def test_a_prefix_that_is_not_kept_is_refused(http, prefix, status):
    http.post(ROUTE, json=request(request_id="kept"), headers=ACCEPT)
    reply = http.post(ROUTE, json=request([1] * 100, prefix=prefix), headers=ACCEPT)
    assert reply.status_code == status


def with_client(server, chat_model, use):
    """Return the result of `use(client)`."""

    async def run():
        model = str(chat_model.directory)
        async with InferenceClient([server.url], api_key=KEY_OF_SERVERS, timeout=HANG, model=model) as client:
            await client.wait_ready(10)
            return await use(client)

    return asyncio.run(run())


@pytest.fixture
def bodies(monkeypatch):
    """Bodies of the requests for tokens."""
    sent, send = [], Connections.request

    async def record(self, method, route, body=b""):
        if route == ROUTE:
            sent.append(json.loads(body))
        return await send(self, method, route, body)

    monkeypatch.setattr(Connections, "request", record)
    return sent


def test_a_later_turn_sends_only_its_new_tokens(server, chat_model, bodies):
    async def use(client):
        session = client.session()
        first = await session.generate(IDS, PARAMS)
        whole = [*IDS, *first.token_ids, 8, 9]
        second = await session.generate(whole, PARAMS)
        await session.generate([*whole[:-1], 1], PARAMS)  # does not continue the second turn
        await client.session().generate(whole, PARAMS)
        return whole, second, await client.generate(whole, PARAMS)

    whole, second, alone = with_client(server, chat_model, use)
    assert second == alone
    assert [len(body["token_ids"]) for body in bodies] == [70, 2, 78, 78, 78]
    assert bodies[1]["prefix"] == {"request_id": bodies[0]["request_id"], "tokens": 76}
    assert [body["token_ids"] for body in bodies if "prefix" in body] == [whole[-2:]]


# vLLM's replies, converted by the middleware.


def vllm_app(seen, *, status=200, reply=None):
    """Return the middleware, on an application that adds the bodies that it gets to `seen`."""
    sys.path.insert(0, str(PLUGIN))
    try:
        from buckeye_vllm_arrays import Arrays
    finally:
        sys.path.remove(str(PLUGIN))

    async def vllm(scope, receive, send):
        message = await receive()
        seen.append(json.loads(message["body"]))
        assert dict(scope["headers"])[b"content-length"] == str(len(message["body"])).encode()
        content = json.dumps(reply or {"choices": [CHOICE]}).encode()
        headers = [(b"content-type", b"application/json"), (b"x-request-id", b"1")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content[:9], "more_body": True})
        await send({"type": "http.response.body", "body": content[9:]})

    return Arrays(vllm)


def ask(app, body, accept=ARRAYS_TYPE, path=ROUTE):
    """Return the status, the content type and the body of a reply. The request arrives in two parts."""
    content, sent = json.dumps(body).encode(), []
    parts = iter([(content[:5], True), (content[5:], False)])
    if accept != ARRAYS_TYPE:
        parts = iter([(content, False)])
    headers = [(b"accept", accept.encode()), (b"content-length", str(len(content)).encode())]

    async def receive():
        part, more = next(parts)
        return {"type": "http.request", "body": part, "more_body": more}

    async def send(message):
        sent.append(message)

    asyncio.run(app({"type": "http", "path": path, "headers": headers}, receive, send))
    start, *rest = sent
    kind = dict(start["headers"])[b"content-type"].decode()
    return start["status"], kind, b"".join(message["body"] for message in rest)


def test_vllm_sends_arrays_to_those_who_accept_them():
    app = vllm_app([])
    status, kind, content = ask(app, request())
    assert (status, kind) == (200, ARRAYS_TYPE)
    (generation,) = parse_generations(content, kind)
    assert generation.token_ids == [5, 6, 7]
    assert generation.logprobs == [-0.5, -1.25, 0.0]
    assert generation.versions == [0, 7, 7]
    assert generation.finish_reason == "stop"
    assert ask(app, request(), accept="application/json")[1:] == (
        "application/json",
        json.dumps({"choices": [CHOICE]}).encode(),
    )


def test_vllm_gets_whole_prompts():
    seen = []
    app = vllm_app(seen)
    ask(app, request([1, 2], request_id="a"))
    prefix = {"request_id": "a", "tokens": 5}
    assert ask(app, request([9], prefix=prefix))[0] == 200
    assert ask(app, request([9], prefix={**prefix, "tokens": 4}))[0] == 200
    assert ask(app, request([9], prefix={**prefix, "request_id": "b"}))[0] == 410
    assert [body["token_ids"] for body in seen] == [[1, 2], [1, 2, 5, 6, 7, 9], [1, 2, 5, 6, 9]]
    assert not any("prefix" in body for body in seen)


@pytest.mark.parametrize(
    ("status", "reply"),
    [
        (400, {"error": {"message": "no"}}),
        (200, {"choices": [{**CHOICE, "logprobs": None}]}),
        (200, {"x": 1}),
    ],
)
def test_another_reply_of_vllm_stays_as_it_is(status, reply):
    got = ask(vllm_app([], status=status, reply=reply), request())
    assert got == (status, "application/json", json.dumps(reply).encode())


@pytest.mark.parametrize("body", [[], {}, {"token_ids": 3}, {"prefix": 3}])
def test_vllm_reports_malformed_requests(body):
    seen = []
    ask(vllm_app(seen, status=400, reply={"error": 1}), body)
    assert len(seen) == 1


@pytest.mark.parametrize("prefix", [3, {}, {"request_id": "a", "tokens": 0}, {"request_id": 1, "tokens": 1}])
def test_an_invalid_prefix_never_reaches_vllm(prefix):
    """vLLM ignores unknown fields: it would continue the new tokens alone."""
    seen = []
    assert ask(vllm_app(seen), request([1], prefix=prefix))[0] == 400
    assert seen == []


# Arrays and kept prompts by themselves.


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": b"\0\0\0"},
        {"token_ids": b"\0" * 8},
        {"logprobs": b"\0" * 16},
        {"logprobs": b"\0\0\xc0\x7f" * 3},
        {"finish_reason": "no"},
        {"weight_versions": [{"version": "1", "start": 0, "end": 1 << 60}]},
        {"weight_versions": [{"version": "x", "start": 0, "end": 3}]},
        {"token_ids": "abc"},
    ],
)
def test_malformed_arrays_are_refused(change):
    arrays = msgspec.to_builtins(
        sampled_arrays([5, 6, 7], [-0.5, -1.0, 0.0], SPANS, "stop"), builtin_types=[bytes]
    )
    assert parse_generations(msgspec.msgpack.encode([arrays]), ARRAYS_TYPE)[0].versions == [0, 7, 7]
    with pytest.raises((ValueError, msgspec.DecodeError)):
        parse_generations(msgspec.msgpack.encode([{**arrays, **change}]), ARRAYS_TYPE)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.lists(st.integers(0, 9), max_size=12))))
def test_kept_prompts_are_whole_or_dropped_and_few(requests):
    kept, last = KeptPrompts(max_tokens=20), {}
    for name, ids in requests:
        reply = sampled_arrays([7], [0.0], SPANS, "stop").token_ids
        kept.keep(name, ids, reply)
        last[name] = [*ids, 7]
    known = 0
    for name, ids in last.items():
        prompt = kept.prompt(Prefix(request_id=name, tokens=len(ids)), [1])
        assert prompt in (None, [*ids, 1])
        known += 0 if prompt is None else len(ids)
    assert known <= 20
    if requests:
        assert kept.prompt(Prefix(request_id=requests[-1][0], tokens=1), []) is not None


def test_a_server_that_dropped_a_prompt_gets_it_again(server, chat_model, bodies, monkeypatch):
    """A restarted server has no kept prompts."""
    send = Connections.request

    async def forget(self, method, route, body=b""):
        if b'"prefix"' in body:
            fields = json.loads(body)
            fields["prefix"]["request_id"] = "before the restart"
            body = json.dumps(fields).encode()
        return await send(self, method, route, body)

    async def use(client):
        session = client.session()
        first = await session.generate(IDS, PARAMS)
        whole = [*IDS, *first.token_ids, 8, 9]
        return await session.generate(whole, PARAMS), await client.generate(whole, PARAMS)

    monkeypatch.setattr(Connections, "request", forget)
    again, alone = with_client(server, chat_model, use)
    assert again == alone
    assert [len(body["token_ids"]) for body in bodies] == [70, 2, 78, 78]
