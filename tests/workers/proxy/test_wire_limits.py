"""End of a rollout at the HTTP endpoint: by its limits, by a failure, or by its own end."""

import asyncio
import json

import anthropic as anthropic_sdk
import httpx
import openai as openai_sdk
import pytest
from tests.orchestrator.fakes import FakeEngine

from buckeye.errors import InferenceError
from buckeye.workers.proxy import Limits, serve

from .players import Saying, anthropic, letters, openai, openai_of

pytestmark = pytest.mark.anyio

ASK = [{"role": "user", "content": "a"}]


async def ask(client, messages=ASK, **more):
    return (await client.chat.completions.create(model="policy", messages=messages, **more)).choices[0]


async def test_call_beyond_max_turns_is_empty_and_the_next_is_refused():
    async with openai(letters(), limits=Limits(max_turns=2)) as (client, endpoint):
        finish = [(await ask(client)).finish_reason for _ in range(2)]
        assert endpoint.usage.stop_reason is None  # an agent that ends by itself now has not hit a limit
        finish.append((await ask(client)).finish_reason)
        with pytest.raises(openai_sdk.BadRequestError, match="max_turns") as refused:
            await ask(client)
        code, usage = refused.value.code, endpoint.usage
    assert (finish, code) == (["stop", "stop", "length"], "rollout_limit")
    assert (usage.calls, usage.turns, usage.stop_reason, usage.failure) == (4, 2, "max_turns", None)


async def test_tokens_are_limited_over_the_whole_rollout():
    engine = FakeEngine()
    async with openai(letters(engine), limits=Limits(max_tokens=6)) as (client, endpoint):
        await ask(client)
        await ask(client)
        last = await ask(client)
        with pytest.raises(openai_sdk.BadRequestError, match="max_tokens"):
            await ask(client)
        usage = endpoint.usage
    assert [params.max_tokens for _, params in engine.calls] == [6, 2]
    assert (last.message.content, last.finish_reason) == ("", "length")
    assert (usage.completion_tokens, usage.stop_reason) == (6, "max_tokens")


async def test_the_time_of_a_rollout_ends_the_call_that_is_open():
    policy = letters(FakeEngine(delay=60.0))
    async with openai(policy, limits=Limits(seconds=0.2)) as (client, endpoint):
        last = await ask(client)
        with pytest.raises(openai_sdk.BadRequestError, match="timeout"):
            await ask(client)
        usage = endpoint.usage
    assert (last.finish_reason, usage.stop_reason, usage.failure) == ("length", "timeout", None)
    assert (policy.turns, policy.segments) == (0, [])


async def test_full_context_ends_one_call_and_a_shorter_one_may_follow(refusal):
    long = [{"role": "user", "content": "a" * 50}]
    async with openai(letters(seq_len=30)) as (client, endpoint):
        await ask(client)
        full = await ask(client, long)
        reason = endpoint.usage.stop_reason
        with refusal(openai_sdk.BadRequestError) as refused:
            await ask(client, long)
        shorter = await ask(client)
        code, usage = refused.value.code, endpoint.usage
    assert (full.message.content, full.finish_reason, reason) == ("", "length", "context")
    assert code == "context_length_exceeded"
    assert (shorter.finish_reason, usage.turns, usage.stop_reason) == ("stop", 2, None)


async def test_a_first_prompt_that_does_not_fit_fails_the_rollout():
    async with openai(letters(seq_len=3)) as (client, endpoint):
        with pytest.raises(openai_sdk.BadRequestError, match="seq_len is 3"):
            await ask(client)
        usage = endpoint.usage
    assert "Raise orchestrator" in usage.failure


@pytest.mark.parametrize("error", [InferenceError("no engine answers"), RuntimeError("a defect")])
def test_a_policy_that_fails_is_a_failure_and_no_answer(error):
    class Failing:
        async def chat(self, messages, *, tools=()):
            raise error

    async def play():
        async with openai(Failing()) as (client, first):
            with pytest.raises(openai_sdk.InternalServerError) as refused:
                await ask(client)
            assert refused.value.status_code == 503
        async with anthropic(Failing()) as (client, second):
            with pytest.raises(anthropic_sdk.APIStatusError) as refused:
                await client.messages.create(model="policy", max_tokens=3, messages=ASK)
            assert refused.value.body["error"]["type"] == "overloaded_error"
        return first.usage.failure, second.usage.failure

    for failure in asyncio.run(play()):
        assert str(error) in failure


async def test_clients_do_not_retry_refused_calls():
    saying = Saying({"role": "assistant", "content": "x"})
    async with serve(saying, limits=Limits(max_turns=1)) as endpoint:
        client = openai_of(endpoint).with_options(max_retries=5)
        await ask(client)
        await ask(client)
        with pytest.raises(openai_sdk.BadRequestError):
            await ask(client)
        await client.close()
        found = endpoint.usage.calls
    assert found == 3


async def test_when_the_block_ends_open_calls_end_and_nothing_more_is_recorded():
    policy = letters(FakeEngine(delay=0.5))
    async with serve(policy) as endpoint:
        client = openai_of(endpoint)
        asking = asyncio.create_task(ask(client))
        while not endpoint.usage.calls:
            await asyncio.sleep(0.01)
    statuses = []
    for late in (asking, ask(client)):
        with pytest.raises(openai_sdk.APIStatusError, match="has ended") as refused:
            await late
        statuses.append(refused.value.status_code)
    await client.close()
    await asyncio.sleep(0.6)
    assert statuses == [410, 410]
    assert (policy.turns, policy.segments) == (0, [])


async def test_disconnect_cancels_the_call():
    engine = FakeEngine(delay=0.3)
    policy = letters(engine)
    async with openai(policy) as (client, endpoint):
        asking = asyncio.create_task(ask(client))
        while not engine.calls:
            await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.wait({asking})
        await asyncio.sleep(0.5)
        assert (policy.turns, policy.segments) == (0, [])
        await ask(client)
        usage = endpoint.usage
    assert (usage.turns, usage.failure) == (1, None)
    assert (policy.turns, len(policy.segments)) == (1, 1)


async def test_interrupted_stream_is_recorded_and_the_conversation_continues():
    policy = letters()
    async with openai(policy) as (client, endpoint):
        stream = await client.chat.completions.create(model="policy", messages=ASK, stream=True)
        await anext(stream.__aiter__())
        await stream.close()
        said = "".join(map(chr, policy.segments[0].token_ids)).split("a:")[-1].removesuffix("$")
        more = [*ASK, {"role": "assistant", "content": said}, {"role": "user", "content": "b"}]
        await ask(client, more)
        found = endpoint.usage.turns
    assert found == 2
    assert (policy.turns_extended, policy.turns_branched) == (1, 0)


async def test_endpoint_accepts_only_the_key_of_its_rollout():
    async with serve(letters()) as one, serve(letters()) as other:
        urls = [
            (f"{one.base_url}/models", {"authorization": f"Bearer {other.api_key}"}),
            (f"{one.base_url}/models", {}),
            (f"{one.base_url}/models", {"x-api-key": one.api_key}),
            (f"{one.root_url}x/v1/models", {"x-api-key": one.api_key}),
            (f"{one.root_url}/v1/embeddings", {"x-api-key": one.api_key}),
            (f"{one.base_url}/chat/completions", {"x-api-key": one.api_key}),
        ]
        async with httpx.AsyncClient() as client:
            found = [(await client.get(url, headers=headers)).status_code for url, headers in urls]
    assert found == [401, 401, 200, 404, 404, 405]


async def test_request_that_is_read_when_the_rollout_ends_is_refused():
    policy = letters()
    async with serve(policy) as endpoint:
        address = endpoint.base_url.removeprefix("http://").partition("/")
        host, port = address[0].split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps({"messages": ASK}).encode()
        head = f"POST /{address[2]}/chat/completions HTTP/1.1\r\nHost: {host}\r\n"
        head += f"content-type: application/json\r\nx-api-key: {endpoint.api_key}\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:5])
        async with httpx.AsyncClient() as client:  # the server has begun to read by then
            models = f"{endpoint.base_url}/models"
            await client.get(models, headers={"x-api-key": endpoint.api_key})
    writer.write(body[5:])
    status = await reader.readline()
    writer.close()
    assert b" 410 " in status
    assert (policy.turns, policy.segments) == (0, [])
