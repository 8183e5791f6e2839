"""Every route with its real client: answers, applied options, dropped options."""

import asyncio
import json

import httpx
import openai as openai_sdk
import pytest
from tests.orchestrator.fakes import FakeEngine
from tests.workers.proxy.players import SCHEMA, Saying, anthropic, letters, openai

from buckeye.envs.base import Reply
from buckeye.envs.chat_server import ChatServer
from buckeye.evaluation.chat_policy import ChatPolicy, ChatSampling

ASK = [{"role": "user", "content": "a"}]
TOOL = {"type": "function", "function": {"name": "find", "parameters": SCHEMA}}
CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"word": "dog"}'}}
CALLS = {"role": "assistant", "content": "I look.", "tool_calls": [CALL, {**CALL, "id": "c2"}]}
THOUGHT = {"role": "assistant", "content": "Four.", "reasoning_content": "Two and two."}


def chats(policy, *asks, **options):
    """Return the answers to chat requests, and the usage that the endpoint has counted."""

    async def play(client, endpoint):
        usual = {"model": "policy", "messages": ASK}
        answers = [await client.chat.completions.create(**{**usual, **ask}) for ask in asks]
        return answers, endpoint.usage

    return using(policy, play, **options)


def using(policy, play, connect=openai, **options):
    """Return the result of `play(client, endpoint)` with a client of this policy."""

    async def run():
        async with connect(policy, **options) as (client, endpoint):
            return await play(client, endpoint)

    return asyncio.run(run())


def dialects(saying, *, tools=False):
    """Return the policy's answer as a chat, a response and a message."""
    flat, own = {"type": "function", **TOOL["function"]}, {"name": "find", "input_schema": SCHEMA}
    chat, response, message = ({"tools": [tool]} if tools else {} for tool in (TOOL, flat, own))

    async def play():
        async with openai(saying) as (client, _):
            answers = (
                await client.chat.completions.create(model="policy", messages=ASK, **chat),
                await client.responses.create(model="policy", input="a", **response),
            )
        async with anthropic(saying) as (client, _):
            answer = await client.messages.create(model="policy", max_tokens=9, messages=ASK, **message)
        return *answers, answer

    return asyncio.run(play())


class Hosted:
    """Hosted model; `say(body)` returns the choice for a request, and `asked` are the requests."""

    def __init__(self, say):
        self._say, self.asked = say, []

    def _answer(self, request):
        self.asked.append(body := json.loads(request.content))
        usage = {"prompt_tokens": 7, "completion_tokens": 1}
        return httpx.Response(200, json={"choices": [self._say(body)], "usage": usage})

    def policy(self, **sampling):
        client = httpx.AsyncClient(transport=httpx.MockTransport(self._answer))
        server = ChatServer(base_url="http://hosted/v1", model="big", client=client)
        return ChatPolicy(server, ChatSampling(**sampling))


def choice_of(content, **more):
    return {"message": {"role": "assistant", "content": content}, "finish_reason": "stop", **more}


def text_of(ids):
    return "".join(map(chr, ids))


def test_a_chat_shows_the_tokens_as_they_were_sampled():
    policy = letters()
    (answer,), _ = chats(policy, {"logprobs": True, "extra_body": {"return_token_ids": True}})
    (segment,) = policy.segments
    choice = answer.choices[0]
    assert answer.prompt_token_ids + choice.token_ids == segment.token_ids.tolist()
    assert [one.logprob for one in choice.logprobs.content] == [-0.5] * len(choice.token_ids)
    assert "".join(one.token for one in choice.logprobs.content) == choice.message.content + "$"
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (6, len(choice.token_ids))


def test_several_choices_are_several_samples_of_one_prompt():
    policy = letters()
    (answer,), usage = chats(policy, {"n": 4})
    texts = [choice.message.content for choice in answer.choices]
    assert usage.turns == policy.turns == len(policy.segments) == 4
    assert sorted(text_of(s.token_ids) for s in policy.segments) == sorted(f"u:a$a:{text}$" for text in texts)
    assert len(set(texts)) > 1


def test_how_to_sample_is_not_a_clients_choice_and_that_is_told_once(caplog):
    engine = FakeEngine()
    names = {"model": "gpt-x", "temperature": 0.2, "frequency_penalty": 0.5, "seed": 1}
    more = {"chat_template_kwargs": {"enable_thinking": False}}
    ask = {**names, "user": "me", "extra_body": more}
    _, usage = chats(letters(engine), ask, ask, environment="theirs")
    assert usage.dropped == dict.fromkeys([*names, *more], 2)
    assert {params.temperature for _, params in engine.calls} == {1.0}
    told = [record.getMessage() for record in caplog.records if "theirs: ignoring" in record.getMessage()]
    assert len(told) == len(usage.dropped)


def test_fewer_tokens_and_stop_texts_are_followed():
    engine = FakeEngine()
    (short, whole), _ = chats(letters(engine), {"max_tokens": 2}, {})
    said = whole.choices[0].message.content
    assert short.usage.completion_tokens == 2
    assert [params.max_tokens for _, params in engine.calls] == [2, 8]
    again = letters(FakeEngine())
    (_, answer), _ = chats(again, {"max_tokens": 2}, {"stop": [said[1:]]})
    cut = said.index(said[1:])
    assert answer.choices[0].message.content == said[:cut]
    assert answer.choices[0].finish_reason == "stop"
    segment = again.segments[1]
    kept = said[: cut + len(said[1:])]  # up to the end of the stop text; later tokens were never sampled
    assert text_of(segment.token_ids) == f"u:a$a:{kept}"
    assert sum(segment.loss_mask) == len(kept)


def test_a_text_goes_on_with_the_tokens_before():
    policy = letters()

    async def play(client, _):
        first = await client.completions.create(model="policy", prompt="once", max_tokens=3)
        text = f"once{first.choices[0].text}$"
        await client.completions.create(model="policy", prompt=f"{text} upon")
        await client.completions.create(model="policy", prompt="else", logprobs=0)
        return text

    text = using(policy, play)
    assert (policy.turns, policy.turns_extended, policy.turns_branched) == (3, 1, 1)
    assert text_of(policy.segments[0].token_ids).startswith(f"{text} upon")


def test_token_ids_go_in_and_come_out_as_from_vllm():
    policy = letters()

    async def play(_, endpoint):
        headers = {"authorization": f"Bearer {endpoint.api_key}"}
        async with httpx.AsyncClient(headers=headers) as client:
            sampling = {"max_tokens": 5, "logprobs": 1, "temperature": 1.0, "skip_special_tokens": False}
            body = {"model": "policy", "token_ids": [97, 98], "sampling_params": sampling}
            first = (await client.post(f"{endpoint.root_url}/inference/v1/generate", json=body)).json()
            ids = [97, 98, *first["choices"][0]["token_ids"], 99]
            body |= {"token_ids": ids, "return_token_ids": True}
            url = f"{endpoint.base_url}/inference/v1/generate"
            return first, (await client.post(url, json=body)).json(), ids

    first, second, ids = using(policy, play)
    choice = first["choices"][0]
    assert [one["token"] for one in choice["logprobs"]["content"]] == [
        f"token_id:{token}" for token in choice["token_ids"]
    ]
    assert second["prompt_token_ids"] == ids
    (segment,) = policy.segments
    assert segment.token_ids.tolist() == [*ids, *second["choices"][0]["token_ids"]]
    assert [i for i, mask in enumerate(segment.loss_mask) if not mask] == [0, 1, len(ids) - 1]


@pytest.mark.parametrize(("choice", "tool"), [("required", "find"), (TOOL, "find"), ("auto", None)])
def test_a_call_may_be_asked_for(choice, tool):
    saying, named = Saying(CALLS), choice is TOOL
    choice = {"type": "function", "function": {"name": "find"}} if named else choice
    (answer,), _ = chats(saying, {"tools": [TOOL], "tool_choice": choice})
    ((_, _, options),) = saying.asked
    assert (options.must_call, options.tool) == (tool is not None, tool)
    assert answer.choices[0].finish_reason == ("stop" if named else "tool_calls")
    calls = answer.choices[0].message.tool_calls
    assert [call.id for call in calls] == (["c1"] if named else ["c1", "c2"])


def test_one_call_at_a_time_where_a_client_wants_that():
    async def play(client, _):
        choice = {"type": "any", "disable_parallel_tool_use": True}
        tools = [{"name": "find", "input_schema": SCHEMA}]
        ask = {"model": "policy", "max_tokens": 9, "messages": ASK, "tools": tools}
        return await client.messages.create(**ask, tool_choice=choice)

    answer = using(Saying(CALLS), play, anthropic)
    assert [block.type for block in answer.content] == ["text", "tool_use"]
    assert (answer.stop_reason, answer.content[1].input) == ("tool_use", {"word": "dog"})


def test_thinking_is_told_in_every_dialect():
    chat, response, message = dialects(Saying(THOUGHT))
    assert chat.choices[0].message.reasoning_content == THOUGHT["reasoning_content"]
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.output[0].content[0].text == THOUGHT["reasoning_content"]
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.content[0].thinking == THOUGHT["reasoning_content"]


def test_a_reply_that_was_cut_off_says_so_in_every_dialect():
    cut = Saying({"role": "assistant", "content": "Fo"}, finish_reason="length")
    chat, response, message = dialects(cut)
    reasons = chat.choices[0].finish_reason, response.incomplete_details.reason, message.stop_reason
    assert reasons == ("length", "max_output_tokens", "max_tokens")


def test_a_policy_that_only_chats_is_cut_at_stop_texts_and_drops_the_rest():
    class Plain:
        async def chat(self, messages, *, tools=()):
            message = {"role": "assistant", "content": "one two"}
            return Reply(text="one two", finish_reason="stop", message=message)

    async def ask(client, endpoint):
        ask = {"model": "policy", "max_tokens": 9, "messages": ASK, "stop_sequences": [" t"]}
        return await client.messages.create(**ask), endpoint.usage.dropped

    async def complete(client, _):
        with pytest.raises(openai_sdk.BadRequestError):
            await client.completions.create(model="policy", prompt="x")

    message, dropped = using(Plain(), ask, anthropic)
    assert (message.content[0].text, message.stop_sequence) == ("one", " t")
    assert dropped == {"max_tokens": 1}
    using(Plain(), complete)


def test_a_hosted_model_is_asked_with_the_options_of_the_agent():
    hosted = Hosted(lambda body: choice_of("x"))
    policy = hosted.policy(temperature=0.5, max_tokens=100)
    ask = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 9, "stop": "z"}
    (answer,), _ = chats(policy, ask)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 1)
    named = {"type": "function", "function": {"name": "find"}}
    expected = {"model": "big", "messages": ASK, "temperature": 0.5, "max_tokens": 9, "stop": ["z"]}
    assert hosted.asked == [{**expected, "tools": [TOOL], "tool_choice": named}]


def test_the_model_and_its_context_are_told():
    async def play(client, _):
        return (await client.models.list()).data

    (model,) = using(letters(seq_len=77), play, model="mine")
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
    hosted = Hosted(lambda body: choice_of("x€", logprobs=told))
    (with_them, without), usage = chats(hosted.policy(), {"logprobs": True}, {})
    content = with_them.choices[0].logprobs and with_them.choices[0].logprobs.content
    assert (content and [(one.token, one.logprob, one.bytes) for one in content]) == expected
    assert without.choices[0].logprobs is None
    assert ["logprobs" in body for body in hosted.asked] == [True, False]
    assert usage.dropped == dropped


@pytest.mark.parametrize(
    "arguments", ['{"word": "dog', "[1]", '"dog"', "\ud83d not JSON".encode("utf-8", "replace").decode()]
)
def test_a_call_with_a_name_is_told_whatever_its_arguments_are(arguments):
    """OpenAI's routes return the call unchanged; Anthropic's has no form for non-object arguments."""
    call = {**CALL, "function": {"name": "find", "arguments": arguments}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    chat, response, message = dialects(Saying(said), tools=True)
    choice, items = chat.choices[0], response.output
    (told,) = choice.message.tool_calls
    assert (told.id, told.function.name, told.function.arguments) == ("c1", "find", arguments)
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert [(item.type, item.name, item.arguments) for item in items] == [
        ("function_call", "find", arguments)
    ]
    assert [block.type for block in message.content] == ["text"]
    assert arguments in message.content[0].text
    assert message.stop_reason == "end_turn"


@pytest.mark.parametrize("arguments", ["", "null"])
def test_a_call_without_arguments_is_a_call_in_every_dialect(arguments):
    call = {**CALL, "function": {"name": "find", "arguments": arguments}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    chat, _, message = dialects(Saying(said), tools=True)
    assert chat.choices[0].finish_reason == "tool_calls"
    assert [(block.type, block.input) for block in message.content] == [("tool_use", {})]


def test_a_call_without_a_name_is_told_as_text():
    call = {**CALL, "function": {"name": "", "arguments": "{'name': find}"}}
    said = Saying({"role": "assistant", "content": "", "tool_calls": [call]})
    (answer,), _ = chats(said, {"tools": [TOOL]})
    choice = answer.choices[0]
    assert (choice.message.tool_calls, choice.finish_reason) == (None, "stop")
    assert choice.message.content == "<tool_call>\n{'name': find}\n</tool_call>"


def test_a_hosted_models_reply_that_is_not_trained_is_no_turn_of_the_rollout():
    policy = Hosted(lambda body: choice_of(body["messages"][-1]["content"].upper())).policy()
    asks = [
        {"messages": [{"role": "user", "content": text}], "extra_body": {"trained": trained}}
        for text, trained in (("a", True), ("b", False))
    ]
    replies, usage = chats(policy, *asks)
    assert [reply.choices[0].message.content for reply in replies] == ["A", "B"]
    assert (policy.turns, policy.replies, policy.completion_tokens) == (1, ["A"], 1)
    assert [message["content"] for message in policy.messages] == ["a", "A"]
    assert (usage.calls, usage.turns, usage.completion_tokens, usage.dropped) == (2, 1, 1, {})
