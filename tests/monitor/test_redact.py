"""All secrets are removed, and nothing else is."""

from __future__ import annotations

import pytest

from buckeye.monitor.redact import redact


def test_names_that_say_secret():
    settings = {
        "api_key": "a",
        "headers": {"X-Team": "b", "nothing": ""},
        "args": {"judge_token": "c", "password": ["d"]},
        "max_tokens": 5,
        "min_tokens": 0,
        "api_key_var": "OPENAI_API_KEY",
        "token": None,
        "tokenizer": "x",
    }
    assert redact(settings) == {
        "api_key": "(redacted)",
        "headers": {"X-Team": "(redacted)", "nothing": ""},
        "args": {"judge_token": "(redacted)", "password": ["(redacted)"]},
        "max_tokens": 5,
        "min_tokens": 0,
        "api_key_var": "OPENAI_API_KEY",
        "token": None,
        "tokenizer": "x",
    }
    assert settings["api_key"] == "a"


@pytest.mark.parametrize(
    "name",
    [
        *("openaiApiKey", "APIKey", "accessToken", "clientSecret", "Authorization", "auth", "basic_auth"),
        *("api_keys", "passwords", "secrets", "cookie", "Set-Cookie", "judge.token", "access_tokens"),
    ],
)
def test_more_names_that_say_secret(name):
    assert redact({name: ["x"]}) == {name: ["(redacted)"]}
    assert redact({name: {"a": "x", "b": 1}}) == {name: {"a": "(redacted)", "b": 1}}


@pytest.mark.parametrize(
    "name",
    ["author", "monkey", "keyboard", "stop_tokens", "tokenType", "authority", "headline", "metric_keys"],
)
def test_names_that_do_not(name):
    assert redact({name: "x"}) == {name: "x"}


def test_values_that_are_secret(monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "correct-horse-battery")
    monkeypatch.setenv("SHORT_KEY", "on")
    for length in range(8, 21):
        monkeypatch.setenv(f"PART_{length}_TOKEN", "correct-horse-battery"[:length])
    texts = {
        "https://me:pw@example.org/v1": "https://(redacted)@example.org/v1",
        "Bearer correct-horse-battery, please": "Bearer (redacted), please",
        "sk-abcdefghijklmnopqrstuv": "(redacted)",
        "x hf_ABCDEFGHIJKLMNOPQRSTUVWX y": "x (redacted) y",
        "turned on": "turned on",
        "Authorization: bearer abc.DEF-123_x/+==": "Authorization: bearer (redacted)",
        "the bearer of news": "the bearer of news",
        "https://a.org/v1?apiKey=abc&n=5&X-Amz-Signature=f0#top": (
            "https://a.org/v1?apiKey=(redacted)&n=5&X-Amz-Signature=(redacted)#top"
        ),
        "is it? key=value": "is it? key=value",
        "task-based-learning-environments": "task-based-learning-environments",
        "user@example.org": "user@example.org",
    }
    assert redact({"a": [list(texts)]}) == {"a": [list(texts.values())]}
