"""The official `openai` client against both engines: one set of tests, one behaviour."""

from __future__ import annotations

import json
import math

import httpx
import openai
import pytest

from tests.waiting import HANG

from .conftest import Server
from .scripted_model import (
    ASK_BOTH,
    ASK_DOG,
    ASK_HARD,
    ASK_HELLO,
    ASK_UNKNOWN,
    COMPLETION,
    CONTEXT,
    FIND,
    FOUND_DOG,
    save_scripted_model,
)

KEY = "a key for tests"
REPLY_TOKENS = 15  # the empty place for reasoning (6), the text (8), the end of the turn
GREEDY = {"temperature": 0.0, "max_tokens": 60}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_scripted_model(tmp_path_factory.mktemp("scripted"))


def settings_of(backend, request):
    if backend == "torch":
        return {"backend": "torch"}
    return {
        "backend": "vllm",
        "vllm_python": str(request.getfixturevalue("vllm_python")),
        "model": {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"},
        "vllm": {"reasoning_parser": "qwen3"},
    }


@pytest.fixture(
    scope="module",
    params=["torch", pytest.param("vllm", marks=[pytest.mark.slow])],
)
def server(request, model, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    running = Server(model, directory, key=KEY, max_num_seqs=16, **settings_of(request.param, request))
    try:
        running.wait_ready(300)
        yield running
    finally:
        running.stop()


def client_of(server, key=KEY):
    transport = httpx.Client(trust_env=False)
    return openai.OpenAI(
        base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=HANG, http_client=transport
    )


@pytest.fixture
def client(server):
    with client_of(server) as connected:
        yield connected


@pytest.fixture
def name(model):
    return str(model)


def reasoning(message):
    """vLLM calls it `reasoning`; the embedded engine has both names."""
    return message.model_dump().get("reasoning")


def said(choice):
    """The content; vLLM keeps the line breaks after the place for reasoning."""
    return (choice.message.content or "").strip()


def joined(chunks):
    """The first choice of a stream, put together."""
    message = {"content": "", "reasoning": "", "calls": {}, "finish": None}
    for chunk in chunks:
        for choice in chunk.choices:
            delta = choice.delta
            message["content"] += delta.content or ""
            message["reasoning"] += reasoning(delta) or ""
            for call in delta.tool_calls or ():
                known = message["calls"].setdefault(call.index, {"name": "", "arguments": ""})
                known["name"] += call.function.name or ""
                known["arguments"] += call.function.arguments or ""
            message["finish"] = choice.finish_reason or message["finish"]
    return {key: value.strip() if isinstance(value, str) else value for key, value in message.items()}


# --- chat ---


def test_a_chat_is_answered(client, name):
    answer = client.chat.completions.create(model=name, messages=ASK_HELLO, **GREEDY)
    assert answer.object == "chat.completion"
    assert answer.model == name
    (choice,) = answer.choices
    assert (choice.message.role, said(choice)) == ("assistant", "Hello, fox!")
    assert choice.finish_reason == "stop"
    assert choice.message.tool_calls in (None, [])
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.completion_tokens == REPLY_TOKENS


def test_content_may_come_in_parts(client, name):
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo?"}]
    answer = client.chat.completions.create(
        model=name, messages=[{"role": "user", "content": parts}], **GREEDY
    )
    # vLLM puts a line break between parts where the template does not read them itself
    assert answer.usage.prompt_tokens >= 15


def test_a_stream_adds_up_to_the_answer(client, name):
    stream = client.chat.completions.create(
        model=name, messages=ASK_HELLO, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    chunks = list(stream)
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len(chunks) > 4
    message = joined(chunks)
    assert message == {"content": "Hello, fox!", "reasoning": "", "calls": {}, "finish": "stop"}
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == REPLY_TOKENS
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_stream_without_options_has_no_usage(client, name):
    chunks = list(client.chat.completions.create(model=name, messages=ASK_HELLO, stream=True, **GREEDY))
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


def test_the_length_limit_has_two_names(client, name):
    for limit in ("max_tokens", "max_completion_tokens"):
        answer = client.chat.completions.create(model=name, messages=ASK_HELLO, temperature=0.0, **{limit: 3})
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.completion_tokens == 3


def test_a_stop_string_ends_the_answer(client, name):
    for stop in (" fox", [" fox", "zebra"]):
        answer = client.chat.completions.create(model=name, messages=ASK_HELLO, stop=stop, **GREEDY)
        assert said(answer.choices[0]) == "Hello,"
        assert answer.choices[0].finish_reason == "stop"


def test_several_choices_and_seeds(client, name):
    def sample(seed):
        answer = client.chat.completions.create(
            model=name, messages=ASK_UNKNOWN, n=3, seed=seed, temperature=2.0, max_tokens=20, logprobs=True
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return ["".join(entry.token for entry in choice.logprobs.content) for choice in answer.choices]

    assert sample(5) == sample(5)
    assert len(set(sample(5))) > 1
    assert sample(5) != sample(6)


def test_logprobs_of_a_chat(client, name):
    answer = client.chat.completions.create(model=name, messages=ASK_HELLO, logprobs=True, **GREEDY)
    content = answer.choices[0].logprobs.content
    assert "Hello, fox!" in "".join(entry.token for entry in content)
    assert len(content) == answer.usage.completion_tokens == REPLY_TOKENS
    assert all(-0.1 < entry.logprob <= 0 for entry in content)
    assert bytes(content[0].bytes).decode() == content[0].token


@pytest.mark.parametrize("stream", [False, True])
def test_top_logprobs_of_a_chat(client, name, stream):
    answer = client.chat.completions.create(
        model=name, messages=ASK_HELLO, logprobs=True, top_logprobs=3, stream=stream, **GREEDY
    )
    choices = [c for chunk in answer for c in chunk.choices] if stream else answer.choices
    content = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    assert len(content) == REPLY_TOKENS
    for entry in content:
        first, *others = entry.top_logprobs
        assert len(others) == 2
        assert (first.token, first.bytes) == (entry.token, entry.bytes)
        assert first.logprob == pytest.approx(entry.logprob, abs=1e-5)
        assert all(other.logprob < first.logprob for other in others)


def test_top_logprobs_of_a_completion(client, name):
    prompt, rest = COMPLETION
    answer = client.completions.create(model=name, prompt=prompt, logprobs=2, **GREEDY)
    logprobs = answer.choices[0].logprobs
    assert "".join(logprobs.tokens).startswith(rest)
    for token, logprob, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert len(top) >= 2
        assert max(top.values()) == top[token] == pytest.approx(logprob, abs=1e-5)


# --- tools and reasoning ---


def test_a_tool_is_called_and_its_result_read(client, name):
    answer = client.chat.completions.create(model=name, messages=ASK_DOG, tools=[FIND], **GREEDY)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert not choice.message.content
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "find")
    assert json.loads(call.function.arguments) == {"word": "dog"}
    called = {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]}
    result = {"role": "tool", "tool_call_id": call.id, "content": "An animal."}
    answer = client.chat.completions.create(
        model=name, messages=[*ASK_DOG, called, result], tools=[FIND], **GREEDY
    )
    assert said(answer.choices[0]) == "It is an animal."
    assert answer.choices[0].finish_reason == "stop"


def test_a_whole_conversation_may_be_sent(client, name):
    answer = client.chat.completions.create(model=name, messages=FOUND_DOG, tools=[FIND], **GREEDY)
    assert said(answer.choices[0]) == "It is an animal."


def test_a_call_in_a_stream(client, name):
    message = joined(
        client.chat.completions.create(
            model=name, messages=ASK_DOG, tools=[FIND], tool_choice="auto", stream=True, **GREEDY
        )
    )
    assert (message["content"], message["finish"]) == ("", "tool_calls")
    (call,) = message["calls"].values()
    assert call["name"] == "find"
    assert json.loads(call["arguments"]) == {"word": "dog"}


NAMED = {"type": "function", "function": {"name": "find"}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("choice", "finish"), [("required", "tool_calls"), (NAMED, "stop")])
def test_a_call_can_be_forced(client, name, choice, finish, stream):
    """The model was asked something else, and it says nothing beside the call."""
    answer = client.chat.completions.create(
        model=name, messages=ASK_HELLO, tools=[FIND], tool_choice=choice, stream=stream, **GREEDY
    )
    if stream:
        message = joined(answer)
        content, (call,), told = message["content"], message["calls"].values(), message["finish"]
    else:
        (whole,) = answer.choices
        (function,) = (one.function for one in whole.message.tool_calls)
        content, call, told = said(whole), function.model_dump(), whole.finish_reason
    assert content == ""
    assert call["name"] == "find"
    assert json.loads(call["arguments"]) == {"word": "dog"}
    assert told == finish


@pytest.mark.parametrize("stream", [False, True])
def test_text_and_two_calls(client, name, stream):
    answer = client.chat.completions.create(
        model=name, messages=ASK_BOTH, tools=[FIND], stream=stream, **GREEDY
    )
    if stream:
        message = joined(answer)
        content, calls = message["content"], list(message["calls"].values())
    else:
        content = answer.choices[0].message.content
        calls = [call.function.model_dump() for call in answer.choices[0].message.tool_calls]
        assert len({call.id for call in answer.choices[0].message.tool_calls}) == 2
    assert content.strip() == "I look."
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [
        ("find", {"word": "dog"})
    ] * 2


def test_without_tools_nothing_is_called(client, name):
    answer = client.chat.completions.create(model=name, messages=ASK_DOG, **GREEDY)
    assert said(answer.choices[0]) == "Which dog?"


def test_reasoning_stands_apart(client, name):
    choice = client.chat.completions.create(model=name, messages=ASK_HARD, **GREEDY).choices[0]
    assert said(choice) == "Four."
    assert reasoning(choice.message).strip() == "Two and two."
    streamed = joined(client.chat.completions.create(model=name, messages=ASK_HARD, stream=True, **GREEDY))
    assert (streamed["content"], streamed["reasoning"]) == ("Four.", "Two and two.")


# --- completions and models ---


def test_a_completion_of_text_and_of_ids(client, server, name):
    prompt, rest = COMPLETION
    with server.http() as http:
        ids = http.post("/tokenize", json={"model": name, "prompt": prompt}).json()["tokens"]
        back = http.post("/detokenize", json={"model": name, "tokens": ids}).json()["prompt"]
    assert back == prompt
    for given in (prompt, ids):
        answer = client.completions.create(model=name, prompt=given, logprobs=0, **GREEDY)
        (choice,) = answer.choices
        assert (answer.object, choice.text, choice.finish_reason) == ("text_completion", rest, "stop")
        assert answer.usage.prompt_tokens == len(ids)
        logprobs = choice.logprobs
        assert len(logprobs.tokens) == len(logprobs.token_logprobs) == 3
        assert logprobs.text_offset[:2] == [0, len(logprobs.tokens[0])]
        assert all(math.exp(logprob) > 0.9 for logprob in logprobs.token_logprobs)


def test_prompts_in_one_request_and_their_stream(client, name):
    prompt, rest = COMPLETION
    answer = client.completions.create(model=name, prompt=[prompt, prompt], **GREEDY)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, rest), (1, rest)]
    texts = {0: "", 1: ""}
    for chunk in client.completions.create(model=name, prompt=[prompt, prompt], stream=True, **GREEDY):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == {0: rest, 1: rest}


def test_messages_as_tokens(client, server, name):
    with server.http() as http:
        chat = {"model": name, "messages": ASK_DOG, "tools": [FIND]}
        counted = http.post("/tokenize", json=chat | {"return_token_strs": True}).json()
        bare = http.post("/tokenize", json=chat | {"add_generation_prompt": False}).json()
    answer = client.chat.completions.create(model=name, messages=ASK_DOG, tools=[FIND], **GREEDY)
    assert counted["count"] == len(counted["tokens"]) == answer.usage.prompt_tokens
    assert counted["max_model_len"] == CONTEXT
    assert len(counted["token_strs"]) == counted["count"]
    assert bare["tokens"] == counted["tokens"][: bare["count"]]
    assert bare["count"] < counted["count"]


def test_the_model_is_listed(client, name):
    assert [model.id for model in client.models.list()] == [name]


# --- errors ---


def test_a_wrong_or_missing_key(server, name):
    with client_of(server, "wrong") as stranger, pytest.raises(openai.AuthenticationError):
        stranger.chat.completions.create(model=name, messages=ASK_HELLO)


def test_another_model(client):
    with pytest.raises(openai.NotFoundError, match="gpt-4"):
        client.chat.completions.create(model="gpt-4", messages=ASK_HELLO)


TOO_LONG = [{"role": "user", "content": "fox " * CONTEXT}]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"messages": TOO_LONG}, "context|maximum|tokens"),
        ({"messages": []}, "message"),
        ({"messages": [{"content": "x"}]}, "role"),
        ({"messages": [{"role": 7, "content": "x"}]}, "role"),
        ({"messages": "hello"}, "messages"),
        ({"messages": ASK_HELLO, "temperature": -1}, "temperature"),
        ({"messages": ASK_HELLO, "top_p": 1.5}, "top_p"),
        ({"messages": ASK_HELLO, "n": 0}, "n"),
        ({"messages": ASK_HELLO, "max_tokens": 0}, "max_tokens"),
        ({"messages": ASK_HELLO, "max_tokens": "many"}, "max_tokens"),
        ({"messages": ASK_HELLO, "tools": [{"type": "function"}]}, "function"),
        ({"messages": ASK_HELLO, "top_logprobs": 2}, "logprobs"),
        ({"messages": ASK_HELLO, "stream_options": {"include_usage": True}}, "(?i)stream"),
    ],
)
def test_a_bad_chat_is_refused_with_a_reason(client, name, body, named):
    others = {field: value for field, value in body.items() if field != "messages"}
    with pytest.raises(openai.BadRequestError, match=named):
        client.chat.completions.create(model=name, messages=body["messages"], extra_body=others)


def test_a_stream_that_cannot_begin_is_an_error_not_a_stream(client, name):
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=name, messages=TOO_LONG, stream=True)


def test_the_server_goes_on_after_a_client_that_left(client, name):
    stream = client.chat.completions.create(
        model=name, messages=ASK_HELLO, stream=True, extra_body={"ignore_eos": True}, max_tokens=900
    )
    next(iter(stream))
    stream.close()
    answer = client.chat.completions.create(model=name, messages=ASK_HELLO, **GREEDY)
    assert said(answer.choices[0]) == "Hello, fox!"
