"""Every route by its real client: what comes back, what is followed, what is dropped."""

import asyncio
import json

import httpx
import openai as openai_sdk
import pytest
from tests.orchestrator.fakes import FakeEngine
from tests.workers.proxy.players import SCHEMA, Saying, anthropic, letters, openai

from buckeye.envs.base import Reply
from buckeye.evaluation.chat_policy import ChatPolicy, ChatSampling, ChatServer

ASK = [{"role": "user", "content": "a"}]
TOOL = {"type": "function", "function": {"name": "find", "parameters": SCHEMA}}
CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"word": "dog"}'}}
CALLS = {"role": "assistant", "content": "I look.", "tool_calls": [CALL, {**CALL, "id": "c2"}]}
THOUGHT = {"role": "assistant", "content": "Four.", "reasoning_content": "Two and two."}


def test_a_chat_shows_the_tokens_as_they_were_sampled():
    policy = letters()

    async def play():
        async with openai(policy) as (client, _):
            return await client.chat.completions.create(
                model="policy", messages=ASK, logprobs=True, extra_body={"return_token_ids": True}
            )

    answer = asyncio.run(play())
    (segment,) = policy.segments
    choice = answer.choices[0]
    assert answer.prompt_token_ids + choice.token_ids == segment.token_ids
    assert [one.logprob for one in choice.logprobs.content] == [-0.5] * len(choice.token_ids)
    assert "".join(one.token for one in choice.logprobs.content) == choice.message.content + "$"
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (6, len(choice.token_ids))


def test_several_choices_are_several_samples_of_one_prompt():
    policy = letters()

    async def play():
        async with openai(policy) as (client, endpoint):
            answer = await client.chat.completions.create(model="policy", messages=ASK, n=4)
            return [choice.message.content for choice in answer.choices], endpoint.usage.turns

    texts, turns = asyncio.run(play())
    assert turns == policy.turns == len(policy.segments) == 4
    assert sorted("".join(map(chr, s.token_ids)) for s in policy.segments) == sorted(
        f"u:a$a:{text}$" for text in texts
    )
    assert len(set(texts)) > 1


def test_how_to_sample_is_not_a_clients_choice_and_that_is_told_once(caplog):
    engine = FakeEngine()

    async def play():
        async with openai(letters(engine), environment="theirs") as (client, endpoint):
            for _ in range(2):
                await client.chat.completions.create(
                    model="gpt-x",
                    messages=ASK,
                    temperature=0.2,
                    frequency_penalty=0.5,
                    seed=1,
                    user="me",
                    extra_body={"chat_template_kwargs": {"enable_thinking": False}},
                )
            return endpoint.usage.dropped

    names = ["model", "temperature", "frequency_penalty", "seed", "chat_template_kwargs"]
    assert asyncio.run(play()) == dict.fromkeys(names, 2)
    assert {params.temperature for _, params in engine.calls} == {1.0}
    told = [record.getMessage() for record in caplog.records if "theirs sets" in record.getMessage()]
    assert len(told) == len(names)


def test_fewer_tokens_and_stop_texts_are_followed():
    engine = FakeEngine()

    async def play():
        async with openai(letters(engine)) as (client, _):
            short = await client.chat.completions.create(model="policy", messages=ASK, max_tokens=2)
            whole = await client.chat.completions.create(model="policy", messages=ASK)
            return short, whole.choices[0].message.content

    short, said = asyncio.run(play())
    assert short.usage.completion_tokens == 2
    assert [params.max_tokens for _, params in engine.calls] == [2, 8]

    again = letters(FakeEngine())

    async def stopped():
        async with openai(again) as (client, _):
            await client.chat.completions.create(model="policy", messages=ASK, max_tokens=2)
            return await client.chat.completions.create(model="policy", messages=ASK, stop=[said[1:]])

    answer = asyncio.run(stopped())
    cut = said.index(said[1:])
    assert answer.choices[0].message.content == said[:cut]
    assert answer.choices[0].finish_reason == "stop"
    segment = again.segments[1]
    kept = said[: cut + len(said[1:])]  # to the token that completes the stop text; the rest was never said
    assert "".join(map(chr, segment.token_ids)) == f"u:a$a:{kept}"
    assert sum(segment.loss_mask) == len(kept)


def test_a_text_goes_on_with_the_tokens_before():
    policy = letters()

    async def play():
        async with openai(policy) as (client, _):
            first = await client.completions.create(model="policy", prompt="once", max_tokens=3)
            text = f"once{first.choices[0].text}$"
            await client.completions.create(model="policy", prompt=f"{text} upon")
            await client.completions.create(model="policy", prompt="else", logprobs=0)
            return text

    text = asyncio.run(play())
    assert (policy.turns, policy.extended, policy.branched) == (3, 1, 1)
    assert "".join(map(chr, policy.segments[0].token_ids)).startswith(f"{text} upon")


def test_token_ids_go_in_and_come_out_as_from_vllm():
    policy = letters()

    async def play():
        async with openai(policy) as (_, endpoint):
            headers = {"authorization": f"Bearer {endpoint.api_key}"}
            async with httpx.AsyncClient(headers=headers) as client:
                sampling = {"max_tokens": 5, "logprobs": 1, "temperature": 1.0, "skip_special_tokens": False}
                body = {"model": "policy", "token_ids": [97, 98], "sampling_params": sampling}
                first = (await client.post(f"{endpoint.root_url}/inference/v1/generate", json=body)).json()
                ids = [97, 98, *first["choices"][0]["token_ids"], 99]
                body |= {"token_ids": ids, "return_token_ids": True}
                url = f"{endpoint.base_url}/inference/v1/generate"
                return first, (await client.post(url, json=body)).json(), ids

    first, second, ids = asyncio.run(play())
    choice = first["choices"][0]
    assert [one["token"] for one in choice["logprobs"]["content"]] == [
        f"token_id:{token}" for token in choice["token_ids"]
    ]
    assert second["prompt_token_ids"] == ids
    (segment,) = policy.segments
    assert segment.token_ids == [*ids, *second["choices"][0]["token_ids"]]
    assert [i for i, mask in enumerate(segment.loss_mask) if not mask] == [0, 1, len(ids) - 1]


@pytest.mark.parametrize(("choice", "tool"), [("required", "find"), (TOOL, "find"), ("auto", None)])
def test_a_call_may_be_asked_for(choice, tool):
    saying = Saying(CALLS)
    choice = {"type": "function", "function": {"name": "find"}} if choice is TOOL else choice

    async def play():
        async with openai(saying) as (client, _):
            return await client.chat.completions.create(
                model="policy", messages=ASK, tools=[TOOL], tool_choice=choice
            )

    answer = asyncio.run(play()).choices[0]
    ((_, _, options),) = saying.asked
    assert (options.must_call, options.tool) == (tool is not None, tool)
    named = isinstance(choice, dict)
    assert answer.finish_reason == ("stop" if named else "tool_calls")
    assert [call.id for call in answer.message.tool_calls] == (["c1"] if named else ["c1", "c2"])


def test_one_call_at_a_time_where_a_client_wants_that():
    async def play():
        async with anthropic(Saying(CALLS)) as (client, _):
            return await client.messages.create(
                model="policy",
                max_tokens=9,
                messages=ASK,
                tools=[{"name": "find", "input_schema": SCHEMA}],
                tool_choice={"type": "any", "disable_parallel_tool_use": True},
            )

    answer = asyncio.run(play())
    assert [block.type for block in answer.content] == ["text", "tool_use"]
    assert (answer.stop_reason, answer.content[1].input) == ("tool_use", {"word": "dog"})


def test_thinking_is_told_in_every_dialect():
    async def play():
        async with openai(Saying(THOUGHT)) as (client, _):
            chat = await client.chat.completions.create(model="policy", messages=ASK)
            response = await client.responses.create(model="policy", input="a")
        async with anthropic(Saying(THOUGHT)) as (client, _):
            message = await client.messages.create(model="policy", max_tokens=9, messages=ASK)
        return chat, response, message

    chat, response, message = asyncio.run(play())
    assert chat.choices[0].message.reasoning_content == "Two and two."
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.output[0].content[0].text == "Two and two."
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.content[0].thinking == "Two and two."


def test_a_reply_that_was_cut_off_says_so_in_every_dialect():
    saying = Saying({"role": "assistant", "content": "Fo"}, finish_reason="length")

    async def play():
        async with openai(saying) as (client, _):
            chat = await client.chat.completions.create(model="policy", messages=ASK)
            response = await client.responses.create(model="policy", input="a")
        async with anthropic(saying) as (client, _):
            message = await client.messages.create(model="policy", max_tokens=9, messages=ASK)
        return chat.choices[0].finish_reason, response.incomplete_details.reason, message.stop_reason

    assert asyncio.run(play()) == ("length", "max_output_tokens", "max_tokens")


def test_a_policy_that_only_chats_is_cut_at_stop_texts_and_drops_the_rest():
    class Plain:
        async def chat(self, messages, *, tools=()):
            return Reply(
                text="one two", finish_reason="stop", message={"role": "assistant", "content": "one two"}
            )

    async def play():
        async with anthropic(Plain()) as (client, endpoint):
            message = await client.messages.create(
                model="policy", max_tokens=9, messages=ASK, stop_sequences=[" t"]
            )
        async with openai(Plain()) as (client, _):
            with pytest.raises(openai_sdk.BadRequestError, match="chats only"):
                await client.completions.create(model="policy", prompt="x")
        return message, endpoint.usage.dropped

    message, dropped = asyncio.run(play())
    assert (message.content[0].text, message.stop_sequence) == ("one", " t")
    assert dropped == {"max_tokens": 1}


def test_a_hosted_model_is_asked_with_the_options_of_the_agent():
    asked = []

    def answer(request):
        asked.append(json.loads(request.content))
        message = {"role": "assistant", "content": "x"}
        usage = {"prompt_tokens": 7, "completion_tokens": 1}
        return httpx.Response(
            200, json={"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage}
        )

    async def play():
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as hosted:
            server = ChatServer(base_url="http://hosted/v1", model="big", client=hosted)
            policy = ChatPolicy(server, ChatSampling(temperature=0.5, max_tokens=100))
            async with openai(policy) as (client, _):
                return await client.chat.completions.create(
                    model="policy", messages=ASK, tools=[TOOL], tool_choice="required", max_tokens=9, stop="z"
                )

    usage = asyncio.run(play()).usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (7, 1)
    (body,) = asked
    named = {"type": "function", "function": {"name": "find"}}
    assert body == {
        "model": "big",
        "messages": [{"role": "user", "content": "a"}],
        "temperature": 0.5,
        "max_tokens": 9,
        "stop": ["z"],
        "tools": [TOOL],
        "tool_choice": named,
    }


def test_the_model_and_its_context_are_told():
    async def play():
        async with openai(letters(seq_len=77), model="mine") as (client, _):
            (model,) = (await client.models.list()).data
            return model

    model = asyncio.run(play())
    assert (model.id, model.max_model_len) == ("mine", 77)


@pytest.mark.parametrize(
    ("told", "expected", "dropped"),
    [
        (
            {"content": [{"token": "x", "logprob": -0.25}, {"token": "€", "logprob": -9.5}]},
            [("x", -0.25, [120]), ("€", -9.5, [226, 130, 172])],
            {},
        ),
        (None, None, {"logprobs": 1}),
        ({"content": "none"}, None, {"logprobs": 1}),
    ],
)
def test_the_log_probs_of_a_hosted_model_are_told_where_it_tells_them(told, expected, dropped):
    asked = []

    def answer(request):
        asked.append(json.loads(request.content))
        choice = {"message": {"role": "assistant", "content": "x€"}, "finish_reason": "stop"}
        return httpx.Response(200, json={"choices": [choice | {"logprobs": told}]})

    async def play():
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as hosted:
            server = ChatServer(base_url="http://hosted/v1", model="big", client=hosted)
            async with openai(ChatPolicy(server, ChatSampling())) as (client, endpoint):
                with_them = await client.chat.completions.create(model="policy", messages=ASK, logprobs=True)
                without = await client.chat.completions.create(model="policy", messages=ASK)
                return with_them.choices[0], without.choices[0], endpoint.usage.dropped

    with_them, without, counted = asyncio.run(play())
    content = with_them.logprobs and with_them.logprobs.content
    assert (content and [(one.token, one.logprob, one.bytes) for one in content]) == expected
    assert without.logprobs is None
    assert ["logprobs" in body for body in asked] == [True, False]
    assert counted == dropped


@pytest.mark.parametrize(
    "arguments", ['{"word": "dog', "[1]", "", '"dog"', "\ud83d not JSON".encode("utf-8", "replace").decode()]
)
def test_a_call_with_a_name_is_told_whatever_its_arguments_are(arguments):
    """As it was written in OpenAI's dialects; Anthropic's has no place for what is no object."""
    call = {**CALL, "function": {"name": "find", "arguments": arguments}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}

    async def play():
        async with openai(Saying(said)) as (client, _):
            chat = await client.chat.completions.create(model="policy", messages=ASK, tools=[TOOL])
            flat = {"type": "function", **TOOL["function"]}
            response = await client.responses.create(model="policy", input="a", tools=[flat])
        tool = {"name": "find", "input_schema": SCHEMA}
        async with anthropic(Saying(said)) as (client, _):
            message = await client.messages.create(model="policy", max_tokens=9, messages=ASK, tools=[tool])
        return chat.choices[0], response.output, message

    choice, items, message = asyncio.run(play())
    (told,) = choice.message.tool_calls
    assert (told.id, told.function.name, told.function.arguments) == ("c1", "find", arguments)
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert [(item.type, item.name, item.arguments) for item in items] == [
        ("function_call", "find", arguments)
    ]
    assert [block.type for block in message.content] == ["text"]
    assert arguments in message.content[0].text
    assert message.stop_reason == "end_turn"


def test_a_call_without_a_name_is_told_as_text():
    call = {**CALL, "function": {"name": "", "arguments": "{'name': find}"}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}

    async def play():
        async with openai(Saying(said)) as (client, _):
            return await client.chat.completions.create(model="policy", messages=ASK, tools=[TOOL])

    choice = asyncio.run(play()).choices[0]
    assert (choice.message.tool_calls, choice.finish_reason) == (None, "stop")
    assert choice.message.content == "<tool_call>\n{'name': find}\n</tool_call>"


def test_a_hosted_models_reply_that_is_not_trained_is_no_turn_of_the_rollout():
    def answer(request):
        said = json.loads(request.content)["messages"][-1]["content"].upper()
        choice = {"message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 7, "completion_tokens": 1}
        return httpx.Response(200, json={"choices": [choice], "usage": usage})

    async def play():
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as hosted:
            policy = ChatPolicy(
                ChatServer(base_url="http://hosted/v1", model="big", client=hosted), ChatSampling()
            )
            async with openai(policy) as (client, endpoint):
                asks = [("a", True), ("b", False)]
                replies = [
                    await client.chat.completions.create(
                        model="policy",
                        messages=[{"role": "user", "content": text}],
                        extra_body={"trained": trained},
                    )
                    for text, trained in asks
                ]
                return [reply.choices[0].message.content for reply in replies], policy, endpoint.usage

    texts, policy, usage = asyncio.run(play())
    assert texts == ["A", "B"]
    assert (policy.turns, policy.replies, policy.completion_tokens) == (1, ["A"], 1)
    assert [message["content"] for message in policy.messages] == ["a", "A"]
    assert (usage.calls, usage.turns, usage.completion_tokens, usage.dropped) == (2, 1, 1, {})
