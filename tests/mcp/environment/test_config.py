"""The configuration file: documented examples load, and each mistake is reported with its line."""

import itertools

import pytest
import yaml

from buckeye.errors import ConfigError
from buckeye.mcp.config import WeightsConfig, gym_schema, load_gym_config

PRINTED = """job:
  name: "RL Training - my-env"
  metadata:
    environment: "my-env:latest"

system_prompt: |
  You are an AI agent interacting with my-env.
  
  Available tools:
  - tool_name(params): Description
    Usage: <tool>tool_name(...)</tool>

parser:
  use_thinking: true
  xml_weight: 0.6
  action_weight: 0.4

action_mappings:
  tool_name:
    _tool: "mcp_tool_name"
    _parser:
      positional: ["param1", "param2"]
    param1:
      from_arg: "param1"

rubric:
  weights:
    task_completion: 0.8
    tool_execution: 0.1
    format_compliance: 0.1
"""
ACTIONS = "action_mappings: {left: {_tool: move, direction: left}}\n"
SMALL = f"system_prompt: hello\n{ACTIONS}"


def load(tmp_path, text, name="my-env.yaml"):
    path = tmp_path / name
    path.write_text(text)
    return load_gym_config(path)


def refused(tmp_path, text):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    return str(caught.value).replace(str(tmp_path / "my-env.yaml"), "FILE")


def test_config_has_defaults_and_always_the_action_done(tmp_path):
    config = load(tmp_path, SMALL)
    assert config.defaults.max_turns == 100
    assert (config.parser.format, config.parser.several_calls) == ("xml", "first")
    assert config.rubric.weights.task_completion == 0.8
    assert list(config.actions) == ["left", "done"]
    assert config.actions["done"].tool is None
    own = load(tmp_path, SMALL + "defaults: {max_turns: 3, time_limit: 9.5}\n")
    assert (own.defaults.max_turns, own.defaults.time_limit) == (3, 9.5)


def test_yaml_1_1_words_are_strings(tmp_path):
    actions = (
        "action_mappings: {on: {_tool: m, a: yes, b: 2024-01-01, c: 1e3, d: 0x10, e: ~, f: True, g: 010}}\n"
    )
    sources = load(tmp_path, f"system_prompt: a\n{actions}").actions["on"].sources
    assert sources == {"a": "yes", "b": "2024-01-01", "c": 1000.0, "d": 16, "e": None, "f": True, "g": 10}


MISTAKES = {
    "defaults": PRINTED + "defalts: {}\n",
    "xml_weight": PRINTED.replace("xml_weight: 0.6", "xml_wait: 0.6"),
    "negative": PRINTED.replace("0.8", "-0.8"),
    "infinite": PRINTED.replace("0.8", ".inf"),
    "too large": PRINTED.replace("0.8", "1e999"),
    "weight": PRINTED.replace("task_completion: 0.8", "thinking_quality: 1"),
    "boolean": PRINTED.replace("use_thinking: true", "use_thinking: maybe"),
    "turns": SMALL + "defaults: {max_turns: true}\n",
    "no weight": SMALL + "rubric: {weights: {tool_execution: 0}}\n",
    "no format weight": SMALL + "parser: {xml_weight: 0, action_weight: 0}\n",
    "no actions": "system_prompt: a\n",
    "no prompt": ACTIONS,
    "empty": "",
    "list": "- a\n",
    "open": "job: {name: a\n",
    "colon": "a: b: c\n",
    "tab": "a:\n\tb: c\n",
    "twice": SMALL + "system_prompt: b\n",
    "number": SMALL + "1: 2\n",
    "tag": SMALL + "job: !!python/object:os.system {}\n",
    "ring": "a: &a [*a]\n",
    "zero": "a: \x00\n",
    "bomb": "a: &a [x,x,x,x,x,x,x,x,x]\n"
    + "".join(f"{n}: &{n} [{','.join([f'*{p}'] * 9)}]\n" for p, n in itertools.pairwise("abcdefg")),
    "name": "system_prompt: a\naction_mappings: {go left: {_tool: m}}\n",
    "several": "promt: a\nparser: {format: xlm}\naction_mappings:\n  a: {_tool: setup}\n  b: {}\n",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_invalid_config_is_refused(tmp_path, mistake, wording):
    assert refused(tmp_path, MISTAKES[mistake]) == wording


ACTION_MISTAKES = """\
{x: 1}
move
{_tool: setup}
{_tool: evaluate}
{_tool: 5}
{_tool: m, _parse: {}}
{_tool: m, _parser: {position: [x]}}
{_tool: m, _parser: {positional: x}}
{_tool: m, _parser: {positional: [x, x]}}
{_tool: m, _parser: {positional: [5]}}
{_tool: m, x: {b: 1}}
{_tool: m, x: {from_args: [b], static: 1}}
{_tool: m, x: {from_arg: b, defualt: 1}}
{_tool: m, x: {from_arg: [b]}}
{_tool: m, x: {from_arg: b, use: true}}
{_tool: m, x: {from_arg: b, use_context: true}}
{_tool: m, x: {from_arg: b, transform: 5}}
{_tool: m, x: {from_arg: b, transform: 'open(x)'}}
{_tool: m, x: {from_arg: b, transform: '().__class__'}}
{_tool: m, x: {from_arg: b, transform: 'lambda x, ctx: 1'}}
{_tool: m, x: {from_args: []}}
{_tool: m, x: {from_args: [b, c], defaults: [1]}}
""".splitlines()


@pytest.mark.parametrize("action", ACTION_MISTAKES)
def test_invalid_action_is_refused_with_its_line(tmp_path, action, wording):
    message = refused(tmp_path, f"system_prompt: hello\naction_mappings:\n  a: {action}\n")
    assert message.startswith("FILE:3 (action_mappings.a")
    assert message == wording


def test_problems_of_a_grader_and_of_other_settings_are_reported_together(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "system_prompt: a\ngrade: hello\n")
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert any("(action_mappings): `action_mappings` must name" in line for line in lines)
    assert any(":2 (grade): expected a table" in line for line in lines)  # the key has no item 0


def test_settings_that_do_not_fit_together_are_a_conflict(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "system_prompt: a\n")
    assert caught.value.code == "BK-CONFIG-CONFLICT"


def test_missing_or_non_utf8_config_is_refused(tmp_path, refusal):
    with refusal(ConfigError):
        load_gym_config(tmp_path / "none.yaml")
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"a: b\nc: \xe9\n")
    with pytest.raises(ConfigError, match=r"latin\.yaml:2") as caught:
        load_gym_config(path)
    assert caught.value.code == "BK-FILE-UNREADABLE"


def test_schema_accepts_the_documented_config_and_no_invalid_actions():
    jsonschema = pytest.importorskip("jsonschema")
    schema = jsonschema.Draft202012Validator(gym_schema())
    jsonschema.Draft202012Validator.check_schema(gym_schema())
    schema.validate(yaml.safe_load(PRINTED))
    for action in ({}, {"_tool": "setup"}, {"_tool": "m", "x": {"fromarg": 1}}, {"_tool": "m", "_parse": {}}):
        assert not schema.is_valid({"action_mappings": {"a": action}})


def test_score_is_the_weighted_mean_of_the_parts():
    parts = {"task_completion": 1.0, "tool_execution": 0.5, "format_compliance": 0.0}
    weights = WeightsConfig(task_completion=0.8, tool_execution=0.1, format_compliance=0.1)
    assert weights.mean(parts) == pytest.approx(0.85)
    scaled = WeightsConfig(task_completion=8, tool_execution=1, format_compliance=1)
    assert scaled.mean(parts) == pytest.approx(0.85)
    assert WeightsConfig(task_completion=3).mean(parts) == 1.0
    assert weights.mean(dict.fromkeys(parts, 1.0)) == pytest.approx(1.0)
