"""Parts of the package that need no `verifiers`."""

import importlib
from pathlib import Path

import pytest

from buckeye.errors import UsageError

SOURCE = Path(__file__).resolve().parents[1] / "src"


@pytest.fixture
def package(monkeypatch):
    monkeypatch.syspath_prepend(SOURCE)
    return importlib.import_module("buckeye_vf_gym")


def test_missing_verifiers_is_reported(package, monkeypatch, refusal):
    monkeypatch.setitem(__import__("sys").modules, "verifiers", None)
    with refusal(UsageError):
        package.load_environment(dataset="a", config_path="b")
    with refusal(UsageError):
        _ = package.GymTaskset
    with pytest.raises(AttributeError):
        _ = package.Gym
    assert package.__all__ == ["GymHarness", "GymTaskset"]  # verifiers finds one of each here


def test_reply_of_converts_chat_messages(package):
    reply_of = importlib.import_module("buckeye_vf_gym.replies").reply_of
    plain = reply_of({"role": "assistant", "content": "hi", "refusal": None}, cut=False)
    assert (plain.text, plain.finish_reason) == ("hi", "stop")
    assert plain.message == {"role": "assistant", "content": "hi"}
    call = {"id": "c", "type": "function", "function": {"name": "move", "arguments": "{}"}}
    thought = reply_of({"content": None, "reasoning_content": "why", "tool_calls": [call]}, cut=True)
    assert (thought.text, thought.finish_reason) == ("<think>why</think>\n", "length")
    assert thought.message == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "why",
        "tool_calls": [call],
    }
    assert (
        reply_of({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, cut=False).text
        == "ab"
    )
