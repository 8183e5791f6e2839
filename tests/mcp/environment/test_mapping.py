"""Every form of the mapping language, with the tool call that it makes."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tests.mcp.gym import gym_config, json_values, mapping

from buckeye.mcp.actions.mapping import ActionError, bind_call
from buckeye.mcp.actions.parser import ParsedCall, parse_reply
from buckeye.mcp.config import GymConfig, ParserConfig
from buckeye.mcp.problems import collect_problems

MAPPINGS = """
left: {_tool: move, _parser: {positional: []}, direction: {static: left}}
move:
  _tool: move
  _parser: {positional: [direction, by]}
  direction: {from_arg: direction}
  by: {from_arg: by}
click:
  _tool: computer
  _parser: {positional: [x, y]}
  action: click
  at: {from_args: [x, y]}
  button: {from_arg: button, default: left}
key:
  _tool: computer
  _parser: {positional: [key]}
  action: key
  keys: {from_arg: key, transform: "lambda x: x.split('+')"}
wait: {_tool: computer, _parser: {positional: [s]}, ms: {from_arg: s, default: 1, transform: "int(x * 1000)"}}
scroll:
  _tool: computer
  _parser: {positional: [direction, amount]}
  delta_y:
    from_arg: amount
    transform: "lambda x, ctx: -x if ctx['direction'] == 'up' else x"
    use_context: true
drag:
  _tool: computer
  path: {from_args: [x, y], defaults: [0, 0]}
  options: {static: {smooth: true}}
  tags: [a, 1]
nothing: {_tool: move, by: {from_arg: by, default: null, transform: int(x)}}
stop: {_tool: null}
"""
SCHEMAS = {"move": {"required": ["direction"]}, "computer": {}}
ACTIONS = gym_config(yaml.safe_load(MAPPINGS)).actions


def bound(text, schemas=None):
    (call,) = parse_reply(f"<tool>{text}</tool>", ParserConfig(use_thinking=False), ACTIONS).calls
    result = bind_call(call, ACTIONS, schemas or {})
    return result.tool, result.arguments


def refused(text, schemas=None):
    with pytest.raises(ActionError) as caught:
        bound(text, schemas)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "tool", "arguments"),
    [
        ("left()", "move", {"direction": "left"}),
        ('move("up")', "move", {"direction": "up"}),
        ('move("up", 2)', "move", {"direction": "up", "by": 2}),
        ('move(by=2, direction="up")', "move", {"direction": "up", "by": 2}),
        ('move("up", by=None)', "move", {"direction": "up", "by": None}),
        ("click(1, 2)", "computer", {"action": "click", "at": [1, 2], "button": "left"}),
        ('click(1, y=2, button="right")', "computer", {"action": "click", "at": [1, 2], "button": "right"}),
        ("click()", "computer", {"action": "click", "button": "left"}),
        ('key("ctrl+a")', "computer", {"action": "key", "keys": ["ctrl", "a"]}),
        ("wait(1.5)", "computer", {"ms": 1500}),
        ("wait()", "computer", {"ms": 1000}),
        ('scroll("up", 3)', "computer", {"delta_y": -3}),
        ('scroll("down", 3)', "computer", {"delta_y": 3}),
        ('scroll("down")', "computer", {}),
        ("drag(y=5)", "computer", {"path": [0, 5], "options": {"smooth": True}, "tags": ["a", 1]}),
        ("nothing()", "move", {"by": None}),
        ("nothing(by='7')", "move", {"by": 7}),
        ("stop()", None, {}),
        ("done()", None, {}),
    ],
)
def test_bind_call_maps_calls_to_tools(text, tool, arguments):
    assert bound(text) == (tool, arguments)


@pytest.mark.parametrize(
    "text",
    [
        "left(1)",
        'move("up", 1, 2)',
        'move("up", direction="up")',
        'move(directon="up")',
        "done(1)",
        "click(1)",
        "key(5)",
        "wait('soon')",
        "scroll(amount=1)",
    ],
)
def test_bind_call_refuses_invalid_calls(text, wording):
    assert refused(text) == wording


def test_missing_tool_argument_is_reported_by_its_name_in_the_action(wording):
    assert refused("move(by=1)", SCHEMAS) == wording
    assert refused("nothing()", SCHEMAS) == wording
    schemas = {"computer": {"required": ["at"]}}
    assert refused("click()", schemas) == wording
    assert bound("left()", SCHEMAS) == ("move", {"direction": "left"})


def test_done_can_be_mapped_to_a_tool():
    actions = gym_config({"done": mapping("submit", "a")}).actions
    assert bind_call(ParsedCall(name="done", args=(5,)), actions, {}).arguments == {"a": 5}


values = json_values(st.text(max_size=5))


@given(
    st.sampled_from([*ACTIONS]),
    st.lists(values, max_size=4),
    st.dictionaries(st.text(max_size=4), values, max_size=2),
)
def test_any_call_is_bound_or_refused_with_action_error(name, args, kwargs):
    call = ParsedCall(name=name, args=tuple(args), kwargs=kwargs)
    try:
        found = bind_call(call, ACTIONS, SCHEMAS)
    except ActionError:
        return
    assert found.tool == ACTIONS[name].tool
    assert found.arguments.keys() <= ACTIONS[name].sources.keys()


parts = st.dictionaries(st.sampled_from(["_tool", "_parser", "x"]), values, max_size=3)


@given(st.dictionaries(st.text(max_size=4), values | parts, max_size=3))
def test_any_mapping_is_compiled_or_reported(raw):
    try:
        actions = gym_config(raw).actions
    except ValidationError as error:
        problems = collect_problems(GymConfig, {"action_mappings": raw}, error)
        assert {problem.path[0] for problem in problems} == {"action_mappings"}
        return
    assert set(actions) == {*raw, "done"}
    assert all(action.tool not in ("setup", "evaluate") for action in actions.values())
