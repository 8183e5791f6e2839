"""Replies: calls with every kind of literal, problems with their positions, and a strict format score."""

import contextlib
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.mcp.gym import json_values

from buckeye.mcp.actions.literals import LiteralError, read_call
from buckeye.mcp.actions.parser import parse_reply, parse_tool_calls
from buckeye.mcp.config import ParserConfig

ACTIONS = ("move", "click", "get-sum", "done")
THINKING = ParserConfig()
PLAIN = ParserConfig(use_thinking=False)


def parse(text, parser=PLAIN):
    return parse_reply(text, parser, ACTIONS)


def arguments(text):
    """Return the positional and named arguments of a call with the arguments `text`."""
    reply = parse(f"<tool>move({text})</tool>")
    assert not reply.problems
    (call,) = reply.calls
    return list(call.args), dict(call.kwargs)


def problem(text, parser=PLAIN):
    reply = parse(text, parser)
    assert not reply.calls
    (only,) = reply.problems
    return only.message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("1, -2,+3", [1, -2, 3]),
        ("1.5, .5, 5., 1e3, -2.5E-1, 0x1F, 1_000", [1.5, 0.5, 5.0, 1000.0, -0.25, 31, 1000]),
        ("true, True, false, False, null, None", [True, True, False, False, None, None]),
        ("\"a, 'b')\", '(\"'", ["a, 'b')", '("']),
        (r'"a\"b\\c\n\té\x41\/\101", "\d\ ' + '\nnext"', ['a"b\\c\n\té\x41/A', "\\d\\ \nnext"]),
        ('"😀", "\\U0001F600"', ["😀", "😀"]),
        ('"one\ntwo"', ["one\ntwo"]),
        ('"""a "quoted" text""", \'\'\'it\'s\'\'\'', ['a "quoted" text', "it's"]),
        ("[1, [2, [3,]], ], (1, (2,)), (5), ()", [[1, [2, [3]]], [1, [2]], 5, []]),
        ("{\"a\": {'b': [null]}, }", [{"a": {"b": [None]}}]),
        ("\n  1 ,\n  2\n", [1, 2]),
        ('"Šuŋka 🐕"', ["Šuŋka 🐕"]),
        ('"</tool>", "<think>"', ["</tool>", "<think>"]),
    ],
)
def test_literals(text, expected):
    assert arguments(text) == (expected, {})


def test_arguments_with_names():
    assert arguments('direction="left", by = 2') == ([], {"direction": "left", "by": 2})
    assert arguments('1, data-key={"a": 1}, šuŋ=None') == ([1], {"data-key": {"a": 1}, "šuŋ": None})


@pytest.mark.parametrize(
    "call",
    [
        "move(left)",
        "move",
        "move 1",
        "move(1",
        'move("left"))',
        "move(,)",
        'move("a)',
        "move(a=1, a=2)",
        "move(a=1, 2)",
        "move({a: 2})",
        'move({"a": 1, "a": 2})',
        "move(007)",
        "move(1e999)",
        f"move({'9' * 5000})",
        "move(NaN)",
        r'move("\ud800")',
        r'move("\x4")',
        r'move("\U00110000")',
        f"move({'[' * 5000})",
        "move(__import__('os'))",
        "move(1+1)",
        "5(1)",
        "fly(1)",
        "moove(1)",
        "",
    ],
    ids=lambda call: call[:30],
)
def test_invalid_calls_are_reported(call, wording):
    assert problem(f"<tool>{call}</tool>") == wording


def test_positions_are_those_of_the_whole_reply():
    text = "<think>a\nb</think>\n<tool>move(1,\n     left)</tool>"
    reply = parse(text, THINKING)
    (only,) = reply.problems
    assert only.message.startswith("line 4, column 6: ")
    assert text[only.position :].startswith("left")


@pytest.mark.parametrize("text", ["", "hello", "<tool>move(1)", "<tool>move("])
def test_replies_without_a_whole_tag(text, wording):
    assert problem(text) == wording


def test_thoughts_are_separated_and_not_run(wording):
    reply = parse("<think> I could <tool>move(1)</tool> </think>\n<tool>move(2)</tool>", THINKING)
    assert [call.args for call in reply.calls] == [(2,)]
    for parser in (THINKING, PLAIN):
        assert parse("<think>a <tool>move(1)</tool></think>", parser).calls == ()
        assert parse("<think>a <tool>move(1)</tool>", parser).calls == ()
        opened_by_the_prompt = parse("so <tool>move(1)</tool>?</think><tool>move(2)</tool>", parser)
        assert [call.args for call in opened_by_the_prompt.calls] == [(2,)]
    assert parse("<think>a").problems[0].message == wording


def test_several_calls_by_policy(wording):
    text = "<tool>move(1)</tool> <tool>move(2)</tool> <tool>fly()</tool>"
    first = parse(text)
    assert [call.args for call in first.calls] == [(1,)]
    assert first.problems[0].message == wording
    every = parse(text, ParserConfig(use_thinking=False, several_calls="all"))
    assert [call.args for call in every.calls] == [(1,), (2,)]
    assert [one.message.partition(": ")[2].split(".")[0] for one in every.problems] == wording
    none = parse(text, ParserConfig(use_thinking=False, several_calls="error"))
    assert none.calls == ()
    assert [one.message for one in none.problems] == wording
    assert (
        parse("<tool>fly()</tool><tool>move(1)</tool>").calls == ()
    )  # the first call counts, and it is wrong


GOOD = "<tool>move(1)</tool>"


@pytest.mark.parametrize(
    ("text", "with_thinking", "without"),
    [
        (f"<think>a</think>\n{GOOD}", 1.0, 0.7),  # without thinking: text outside a call, 0.6 / 2 + 0.4
        (GOOD, 0.7, 1.0),
        ("hello", 0.0, 0.0),
        ("", 0.0, 0.0),
        ("<think>a</think>", 0.0, 0.0),
        ("<think></think><tool></tool>", 0.0, 0.0),
        ("<think>a</think><tool> </tool>", 0.0, 0.0),
        (f"<think> </think>{GOOD}", 0.7, 1.0),
        (f"<think>a</think>{GOOD} and more", 0.7, 0.7),
        (f"before <think>a</think>{GOOD}", 0.7, 0.7),
        (f"{GOOD}<think>a</think>", 0.55, 0.7),
        ("<think>a</think><tool>fly()</tool>", 0.6, 0.3),
        ("<think>a</think><tool>move(left)</tool>", 0.6, 0.3),
        ("<think>a</think><tool>move(1)", 0.0, 0.0),
        (f"<think>a</think>{GOOD}{GOOD}", 0.8, 0.5),
        (f"a</think>{GOOD}", 1.0, 0.7),
    ],
)
def test_format_score(text, with_thinking, without):
    assert parse(text, THINKING).format_score == pytest.approx(with_thinking)
    assert parse(text, PLAIN).format_score == pytest.approx(without)


def test_weights_of_the_format_score_are_relative():
    parser = ParserConfig(xml_weight=3, action_weight=1)
    assert parse("<think>a</think><tool>fly()</tool>", parser).format_score == pytest.approx(0.75)
    every = ParserConfig(several_calls="all")
    assert parse(f"<think>a</think>{GOOD}{GOOD}", every).format_score == pytest.approx(1.0)
    assert parse(f"<think>a</think>{GOOD}<tool>fly()</tool>", every).format_score == pytest.approx(0.8)


def test_a_flood_of_tags_is_cut():
    reply = parse("<tool>move(1)</tool>" * 1000)
    assert len(reply.calls) == 1
    assert any("more than 64 calls" in one.message for one in reply.problems)
    assert reply.format_score < 0.4


def native(*calls, **message):
    made = [
        {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": written}}
        for i, (name, written) in enumerate(calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": made, **message}


def test_native_calls(wording):
    every = ParserConfig(format="tools", several_calls="all")
    written = [("fly", "{}"), ("", "<broken"), ("move", "[1]"), ("move", "{")]
    calls = native(("move", '{"by": 2}'), *written, ("move", ""))
    reply = parse_tool_calls(calls, every, ACTIONS)
    assert [(call.name, dict(call.kwargs), call.call_id) for call in reply.calls] == [
        ("move", {"by": 2}, "c0"),
        ("move", {}, "c5"),
    ]
    assert {one.call_id: one.message for one in reply.problems} == wording
    assert reply.format_score == pytest.approx(2 / 6)
    for written in ('{"a": NaN}', '{"a": 1e999}', r'{"a": "\ud800"}', '{"a": 1, "a": 2}', "[" * 100_000):
        assert parse_tool_calls(native(("move", written)), every, ACTIONS).calls == ()


@pytest.mark.parametrize("written", [5, 0, 0.5, True, False, [], [1], ["a"], '"text"', "5", "[]"])
def test_native_arguments_that_are_not_an_object_are_reported(written, wording):
    reply = parse_tool_calls(native(("move", written)), ParserConfig(format="tools"), ACTIONS)
    assert reply.calls == ()
    assert reply.problems[0].message == wording


@pytest.mark.parametrize("written", [None, "", " ", "null", "{}", {}, '"{}"'])
def test_a_native_call_may_have_no_arguments(written):
    (call,) = parse_tool_calls(native(("move", written)), ParserConfig(format="tools"), ACTIONS).calls
    assert call.kwargs == {}


@pytest.mark.parametrize(
    ("text", "plain", "is_answer", "score"),
    [
        ("<think>Six sevens.</think>It is 42.", "It is 42.", True, 1.0),
        ("It is 42.", "It is 42.", True, 0.5),
        ("I look. <tool>done()</tool> It is 42.", "I look.\nIt is 42.", False, 0.5),
        ("It is 42. <tool>fly(", "It is 42.", False, 0.5),
        ("<think>It is 42.", "", False, 0.5),
        ("<think></think>", "", False, 0.5),
        ("", "", False, 0.5),
    ],
)
def test_plain_text_reply(text, plain, is_answer, score):
    reply = parse_reply(text, ParserConfig(), ACTIONS)
    assert (reply.plain, reply.is_answer, reply.answer_score) == (plain, is_answer, score)


def test_surplus_native_calls_are_each_reported(wording):
    calls = native(("move", "{}"), ("move", "{}"))
    first = parse_tool_calls(calls, ParserConfig(format="tools"), ACTIONS)
    assert [call.call_id for call in first.calls] == ["c0"]
    assert [one.call_id for one in first.problems] == ["c1"]
    assert first.format_score == 0.5
    none = parse_tool_calls(calls, ParserConfig(format="tools", several_calls="error"), ACTIONS)
    assert none.calls == ()
    assert [one.call_id for one in none.problems] == ["c0", "c1"]
    silent = parse_tool_calls({"role": "assistant", "content": "hi"}, ParserConfig(format="tools"), ACTIONS)
    assert (silent.calls, silent.format_score) == ((), 0.0)
    assert silent.problems[0].message == wording


values = json_values(st.text(max_size=5), leaves=8)


@given(values)
def test_a_value_survives_python_and_json(value):
    for written in (repr(value), json.dumps(value), json.dumps(value, ensure_ascii=False, indent=1)):
        assert read_call(f"f({written})", 0).args == [value]


@given(
    st.lists(values, max_size=2),
    st.dictionaries(st.sampled_from(["a", "b-c", "šuŋ"]), values, max_size=2),
)
def test_a_call_survives_within_its_tags(args, kwargs):
    inner = ", ".join([*map(repr, args), *(f"{name}={json.dumps(value)}" for name, value in kwargs.items())])
    assert arguments(inner) == (args, kwargs)


WORDS = '<tool> </tool> <think> </think> move( click """ true \\u12'
pieces = st.sampled_from([*"()[]{},:=\"'\\ \n.-1eax", *WORDS.split()])


@given(st.text() | st.lists(pieces).map("".join))
@example("<tool>" * 100 + "move('" * 100)
def test_any_text_is_parsed_without_an_exception(text):
    for parser in (THINKING, PLAIN, ParserConfig(several_calls="all")):
        reply = parse(text, parser)
        assert 0.0 <= reply.format_score <= 1.0
        assert reply.calls or reply.problems
        for one in reply.problems:
            assert 0 <= one.position <= len(text)
            assert one.message.startswith(f"line {text.count(chr(10), 0, one.position) + 1}, ")


@given(st.lists(pieces).map("".join) | st.text())
def test_any_literal_is_parsed_as_json_or_refused(text):
    with contextlib.suppress(LiteralError):
        values = read_call(f"f({text})", 0).args
        assert json.loads(json.dumps(values, allow_nan=False)) == values
