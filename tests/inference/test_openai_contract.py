"""The official `openai` client against both engines, which must behave the same."""

import json
import math

import httpx
import openai
import pytest

from tests.waiting import HANG

from .conftest import LocalServer, Server
from .scripted_model import (
    ANIMAL,
    ASK_BOTH,
    ASK_DOG,
    ASK_HARD,
    ASK_HELLO,
    COMPLETION,
    CONTEXT,
    FIND,
    THOUGHT,
    save_scripted_model,
)

pytestmark = pytest.mark.e2e

KEY = "a key for tests"
REPLY_TOKENS = 15  # the empty reasoning block (6), the text (8), the end of the turn
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
    kind = LocalServer if request.param == "torch" else Server
    settings = settings_of(request.param, request)
    with kind(model, tmp_path_factory.mktemp(request.param), key=KEY, max_num_seqs=16, **settings) as running:
        yield running


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
    """Return the field `reasoning`, which both engines send."""
    return message.model_dump().get("reasoning")


def said(choice):
    """Return the content without the line breaks that vLLM keeps after the reasoning block."""
    return (choice.message.content or "").strip()


def joined(chunks):
    """Return the first choice of a stream with its deltas joined."""
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


def test_the_length_limit_has_two_names(client, name):
    for limit in ("max_tokens", "max_completion_tokens"):
        answer = client.chat.completions.create(model=name, messages=ASK_HELLO, temperature=0.0, **{limit: 3})
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.completion_tokens == 3


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
    assert said(answer.choices[0]) == ANIMAL
    assert answer.choices[0].finish_reason == "stop"


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
def test_a_call_can_be_forced(server, client, name, choice, finish, stream):
    """The model was trained to reply with text here; a forced reply contains only the call."""
    if not isinstance(server, LocalServer):
        pytest.skip("so small a model never ends the JSON that vLLM forces on it")
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


def test_reasoning_is_separate_from_content(client, name):
    choice = client.chat.completions.create(model=name, messages=ASK_HARD, **GREEDY).choices[0]
    assert said(choice) == "Four."
    assert reasoning(choice.message).strip() == THOUGHT
    streamed = joined(client.chat.completions.create(model=name, messages=ASK_HARD, stream=True, **GREEDY))
    assert (streamed["content"], streamed["reasoning"]) == ("Four.", THOUGHT)


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
