"""Requests: typed, and refused with a message that names the field."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buckeye.errors import UsageError
from buckeye.inference.protocol import ChatRequest, CompletionRequest, GenerateRequest, parse

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
    assert parse(json.dumps(body).encode(), CompletionRequest).prompt == "x"


@pytest.mark.parametrize(
    ("kind", "body", "named"),
    [
        (CompletionRequest, {"prompt": "x", "max_token": 3}, "max_token"),
        (CompletionRequest, {"prompt": "x", "frequency_penalty": 0.5}, "frequency_penalty"),
        (CompletionRequest, {"prompt": "x", "temperature": "hot"}, r"\$\.temperature"),
        (CompletionRequest, {"prompt": "x", "top_p": 0}, r"\$\.top_p"),
        (CompletionRequest, {"prompt": "x", "n": 0}, r"\$\.n"),
        (CompletionRequest, {"prompt": "x", "max_tokens": 0}, r"\$\.max_tokens"),
        (CompletionRequest, {"prompt": "x", "seed": 2**63}, r"\$\.seed"),
        (CompletionRequest, {}, "prompt"),
        (ChatRequest, {"messages": "hi"}, "messages"),
        (ChatRequest, {"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools"),
        (GenerateRequest, {"token_ids": [-1], "sampling_params": {}}, "token_ids"),
        (GenerateRequest, {"token_ids": [1], "sampling_params": {"min_p": 0.1}}, "min_p"),
        (GenerateRequest, {"token_ids": [1], "sampling_params": {"temprature": 1}}, "temprature"),
    ],
)
def test_a_bad_field_is_named(kind, body, named):
    with pytest.raises(UsageError, match=named):
        parse(json.dumps(body).encode(), kind)


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


@given(
    kind=st.sampled_from([CompletionRequest, ChatRequest, GenerateRequest]),
    body=st.dictionaries(NAMES, JSON, max_size=6) | JSON,
)
def test_any_json_is_a_request_or_a_usage_error(kind, body):
    with contextlib.suppress(UsageError):
        assert isinstance(parse(json.dumps(body).encode(), kind), kind)


@given(st.binary(max_size=30))
def test_any_bytes_are_a_request_or_a_usage_error(body):
    with pytest.raises(UsageError):
        parse(body, GenerateRequest)


def test_the_modules_that_others_import_need_no_torch():
    code = (
        "import sys, buckeye.inference.client, buckeye.inference.render, buckeye.inference.protocol;"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
