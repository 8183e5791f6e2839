"""Requests are typed, and refused with a message that names the field."""

import contextlib
import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buckeye.chat.openai_api import ChatRequest, CompletionRequest, GenerateRequest, parse_request
from buckeye.errors import UsageError

TOOL = {"type": "function", "function": {"name": "f"}}
OTHER = {"type": "function", "function": {"name": "other"}}
MESSAGES = [{"role": "user", "content": "hi"}]


def test_neutral_and_ignored_fields_are_accepted():
    body = {
        "prompt": "x",
        "frequency_penalty": 0,
        "logit_bias": None,
        "response_format": {"type": "text"},
        "user": "me",
        "repetition_penalty": 1.0,
    }
    assert parse_request(json.dumps(body).encode(), CompletionRequest).prompt == "x"


@pytest.mark.parametrize(
    ("kind", "body", "named"),
    [
        (CompletionRequest, {"prompt": "x", "max_token": 3}, "max_token"),
        (CompletionRequest, {"prompt": "x", "frequency_penalty": 0.5}, "frequency_penalty"),
        (CompletionRequest, {"prompt": "x", "top_p": 0}, r"\$\.top_p"),
        (CompletionRequest, {"prompt": "x", "n": 0}, r"\$\.n"),
        (CompletionRequest, {"prompt": "x", "max_tokens": 0}, r"\$\.max_tokens"),
        (CompletionRequest, {"prompt": "x", "seed": 2**63}, r"\$\.seed"),
        (CompletionRequest, {}, "prompt"),
        (ChatRequest, {"messages": MESSAGES, "tools": [TOOL, TOOL]}, "'f'"),
        (ChatRequest, {"messages": MESSAGES, "tool_choice": "required"}, "tool_choice"),
        (ChatRequest, {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "always"}, "tool_choice"),
        (ChatRequest, {"messages": MESSAGES, "tools": [TOOL], "tool_choice": OTHER}, "'other'"),
        (ChatRequest, {"messages": [{"role": "wizard", "content": "x"}]}, r"\$\.messages\[0\]\.role"),
        (ChatRequest, {"messages": MESSAGES, "response_format": {"type": "json_object"}}, "response_format"),
        (ChatRequest, {"messages": MESSAGES, "stream_options": {}}, "stream_options"),
        (ChatRequest, {"messages": MESSAGES, "top_logprobs": 1}, "top_logprobs"),
        (ChatRequest, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, r"\$\.top_logprobs"),
        (CompletionRequest, {"prompt": "x", "logprobs": -1}, r"\$\.logprobs"),
        (GenerateRequest, {"token_ids": [1], "sampling_params": {}, "stream_options": {}}, "stream_options"),
        (CompletionRequest, {"prompt": "x", "echo": True}, "echo"),
        (GenerateRequest, {"token_ids": [-1], "sampling_params": {}}, "token_ids"),
        (GenerateRequest, {"token_ids": [1], "sampling_params": {"min_p": 0.1}}, "min_p"),
        (GenerateRequest, {"token_ids": [1], "sampling_params": {"temprature": 1}}, "temprature"),
    ],
)
def test_a_bad_field_is_named(kind, body, named):
    with pytest.raises(UsageError, match=named) as caught:
        parse_request(json.dumps(body).encode(), kind)
    assert caught.value.code == "BK-INFERENCE-REQUEST"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(
    [
        "prompt",
        "messages",
        "token_ids",
        "sampling_params",
        "max_tokens",
        "stop",
        "n",
        "tools",
        "min_p",
        "logprobs",
    ]
)


def test_a_message_of_the_openai_client_can_be_sent_back():
    from openai.types.chat import ChatCompletionMessage

    call = {"id": "c", "type": "function", "function": {"name": "find", "arguments": "{}"}}
    got = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "Hm."}
    sent = ChatCompletionMessage.model_validate(got).model_dump()
    body = {"messages": [*MESSAGES, sent, {"role": "tool", "tool_call_id": "c", "content": "x"}]}
    _, assistant, result = (
        m.to_template_message() for m in parse_request(json.dumps(body).encode(), ChatRequest).messages
    )
    assert assistant == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Hm.",
        "tool_calls": [call],
    }
    assert result == {"role": "tool", "tool_call_id": "c", "content": "x"}


def test_developer_message_becomes_a_system_message_with_one_text():
    parts = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
    body = {"messages": [{"role": "developer", "content": parts}]}
    (message,) = parse_request(json.dumps(body).encode(), ChatRequest).messages
    assert message.to_template_message() == {"role": "system", "content": "Be brief."}


def test_half_a_surrogate_pair_is_replaced():
    """Python's clients send it, for example as the result of a tool that cut an emoji."""
    body = json.dumps({"messages": [{"role": "user", "content": "cut \ud83d, whole \ud83d\ude00"}]})
    (message,) = parse_request(body.encode(), ChatRequest).messages
    assert message.to_template_message()["content"] == "cut \ufffd, whole \U0001f600"


def test_tools_are_kept_unchanged():
    tool = {"function": {"parameters": {}, "name": "f"}, "type": "function"}
    body = {"messages": MESSAGES, "tools": [tool]}
    request = parse_request(json.dumps(body).encode(), ChatRequest)
    assert json.dumps(request.offered_tools()) == json.dumps([tool])  # also keeps the order of the keys
    assert (
        parse_request(json.dumps(body | {"tool_choice": "none"}).encode(), ChatRequest).offered_tools() == []
    )


@given(
    kind=st.sampled_from([CompletionRequest, ChatRequest, GenerateRequest]),
    body=st.dictionaries(NAMES, JSON, max_size=6) | JSON,
)
def test_any_json_is_a_request_or_a_usage_error(kind, body):
    with contextlib.suppress(UsageError):
        assert isinstance(parse_request(json.dumps(body).encode(), kind), kind)


@given(st.binary(max_size=30))
def test_any_bytes_are_a_request_or_a_usage_error(body):
    with pytest.raises(UsageError):
        parse_request(body, GenerateRequest)


def test_light_modules_do_not_import_torch():
    code = (
        "import sys, buckeye.inference.client, buckeye.inference.render, buckeye.chat.openai_api;"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
