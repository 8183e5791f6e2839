"""Tools in a conversation: limits, errors that the model can read, counts."""

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buckeye.envs.base import Reply
from buckeye.envs.tool_loop import ToolError, play_with_tools
from buckeye.errors import InferenceError

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "parameters": {
                "type": "object",
                "properties": {
                    "word": {"type": "string"},
                    "page": {"type": "integer"},
                    "kind": {"enum": ["noun", "verb"]},
                },
                "required": ["word"],
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
ASK = ({"role": "user", "content": "What is a dog?"},)


class Scripted:
    """Policy with scripted replies: texts, or lists of (name, arguments) to call; repeats the last one."""

    def __init__(self, *lines, finish="stop"):
        self.lines = list(lines)
        self.finish = finish
        self.seen = []

    async def chat(self, messages, *, tools=()):
        self.seen.append(list(messages))
        line = self.lines.pop(0) if len(self.lines) > 1 else self.lines[0]
        message = {"role": "assistant", "content": line if isinstance(line, str) else ""}
        if not isinstance(line, str):
            message["tool_calls"] = [
                {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
                for i, (name, arguments) in enumerate(line)
            ]
        return Reply(text=message["content"], finish_reason=self.finish, message=message)


def play(policy, call=lambda name, arguments: f"{name} of {dict(arguments)}", **settings):
    return asyncio.run(play_with_tools(policy, ASK, TOOLS, call, **{"max_calls": 4, **settings}))


def result_of(name, arguments, call=lambda name, arguments: "found"):
    """Return the result of one call, as the model reads it, and the number of counted errors."""
    played = play(Scripted([(name, arguments)], "done"), call)
    (result,) = [m for m in played.messages if m["role"] == "tool"]
    return result["content"], played.tool_errors


def test_reply_without_calls_ends_the_loop():
    played = play(Scripted("An animal."))
    assert (played.stop_reason, played.reply.text) == ("answered", "An animal.")
    assert played.components == {"n_turns": 1.0, "tool_calls": 0.0, "tool_errors": 0.0}


def test_results_are_read_in_the_next_turn():
    policy = Scripted([("lookup", '{"word": "dog"}'), ("now", "{}")], "An animal.")
    played = play(policy)
    assert policy.seen[1][2:] == [
        {"role": "tool", "tool_call_id": "c0", "name": "lookup", "content": "lookup of {'word': 'dog'}"},
        {"role": "tool", "tool_call_id": "c1", "name": "now", "content": "now of {}"},
    ]
    assert (played.n_turns, played.tool_calls, played.tool_errors) == (2, 2, 0)
    assert played.messages[-1] == played.reply.message


def test_tools_may_be_async_and_arguments_may_be_parsed_already():
    async def call(name, arguments):
        await asyncio.sleep(0)
        return arguments["word"].upper()

    assert result_of("lookup", {"word": "dog"}, call) == ("DOG", 0)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("lokup", "{}"),
        ("", "{'word': dog}"),
        ("lookup", "{'word': dog}"),
        ("lookup", "[" * 100_000),
        ("lookup", '["dog"]'),
        ("lookup", "{}"),
        ("lookup", '{"word": "dog", "pag": 1}'),
        ("lookup", '{"word": 3}'),
        ("lookup", '{"word": "dog", "page": true}'),
        ("lookup", '{"word": "dog", "kind": "x"}'),
        ("now", '{"x": 1}'),
    ],
)
def test_invalid_call_returns_an_error_to_the_model(name, arguments, wording):
    content, errors = result_of(name, arguments)
    assert content == wording
    assert errors == 1


@pytest.mark.parametrize("arguments", ["", "null", "{}", None])
def test_a_call_may_have_no_arguments(arguments):
    assert result_of("now", arguments)[1] == 0


def test_tool_error_is_returned_to_the_model():
    def call(name, arguments):
        raise ToolError("no such page")

    assert result_of("now", "{}", call) == ("Error: no such page", 1)


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("x"), InferenceError("the judge is down"), TimeoutError("own")]
)
def test_a_tool_that_fails_fails_the_rollout(error):
    async def call(name, arguments):
        raise error

    with pytest.raises(type(error)):
        result_of("now", "{}", call)


@pytest.mark.parametrize("result", [7, None, {"a": 1}])
def test_result_that_is_not_text_raises_type_error(result):
    with pytest.raises(TypeError, match="'now' returned"):
        result_of("now", "{}", lambda name, arguments: result)


def test_tool_timeout_returns_an_error_to_the_model(wording):
    async def call(name, arguments):
        await asyncio.sleep(60)
        return "late"

    played = play(Scripted([("now", "{}")], "done"), call, timeout=0.02)
    assert played.messages[2]["content"] == wording
    assert played.stop_reason == "answered"


def test_long_result_is_truncated_with_a_note():
    content, errors = result_of("now", "{}", lambda name, arguments: "x" * 8_010)
    assert content == "x" * 8_000 + "\n(cut: 10 more characters)"
    assert errors == 0


def test_last_result_has_a_note_that_no_calls_are_left():
    ran = []
    policy = Scripted([("now", "{}")] * 3, [("now", "{}")], "done")
    played = play(policy, lambda name, arguments: ran.append(name) or "noon", max_calls=2)
    contents = [m["content"] for m in played.messages if m["role"] == "tool"]
    none_left = "Error: no calls are left. Answer now."
    assert contents == ["noon", "noon\n(No calls are left. Answer now.)", none_left, none_left]
    assert len(ran) == 2
    assert (played.stop_reason, played.tool_calls, played.tool_errors) == ("answered", 4, 2)


def test_policy_that_always_calls_tools_is_stopped():
    played = play(Scripted([("now", "{}")]), max_calls=3)
    assert (played.stop_reason, played.n_turns, played.tool_calls) == ("turn_limit", 5, 5)


def test_truncated_reply_ends_the_loop_without_running_its_calls():
    ran = []
    played = play(Scripted([("now", "{}")], finish="length"), lambda name, arguments: ran.append(name))
    assert (played.stop_reason, ran) == ("truncated", [])


@given(
    lines=st.lists(
        st.one_of(
            st.text(max_size=3),
            st.lists(
                st.tuples(
                    st.sampled_from(["lookup", "now", "", "x"]),
                    st.one_of(
                        st.text(max_size=5),
                        st.dictionaries(
                            st.sampled_from(["word", "page", "y"]), st.integers() | st.text()
                        ).map(json.dumps),
                    ),
                ),
                min_size=1,
                max_size=3,
            ),
        ),
        min_size=1,
        max_size=8,
    ),
    max_calls=st.integers(0, 4),
)
def test_loop_always_ends_and_every_call_has_a_result(lines, max_calls):
    ran = []
    played = play(Scripted(*lines), lambda name, arguments: ran.append(name) or "found", max_calls=max_calls)
    asked = [c for m in played.messages[:-1] for c in m.get("tool_calls", ())]
    results = [m for m in played.messages if m["role"] == "tool"]
    assert len(results) == len(asked)
    assert [r["content"].startswith("Error") for r in results].count(True) == played.tool_errors
    assert len(ran) <= max_calls
    assert played.n_turns <= max_calls + 2
    assert played.stop_reason in ("answered", "turn_limit")
