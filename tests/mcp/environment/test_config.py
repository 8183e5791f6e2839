"""The configuration file: what is printed loads, and every mistake is named with its line."""

import itertools
import json
import re

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from buckeye.errors import ConfigError
from buckeye.mcp.config import GymConfig, WeightsConfig, gym_schema, load_gym_config
from buckeye.mcp.score import score

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


def test_the_configuration_as_printed(tmp_path):
    config = load(tmp_path, PRINTED)
    assert config.job.name == "RL Training - my-env"
    assert config.job.metadata == {"environment": "my-env:latest"}
    assert config.system_prompt.startswith(
        "You are an AI agent interacting with my-env.\n\nAvailable tools:\n"
    )
    assert config.system_prompt.endswith("    Usage: <tool>tool_name(...)</tool>\n".removeprefix("  "))
    assert (config.parser.use_thinking, config.parser.xml_weight, config.parser.action_weight) == (
        True,
        0.6,
        0.4,
    )
    assert config.rubric.weights == WeightsConfig(
        task_completion=0.8, tool_execution=0.1, format_compliance=0.1
    )
    action = config.actions["tool_name"]
    assert (action.tool, action.positional, tuple(action.sources)) == (
        "mcp_tool_name",
        ("param1", "param2"),
        ("param1",),
    )


def test_what_is_left_out_has_defaults_and_done_is_always_there(tmp_path):
    config = load(tmp_path, SMALL)
    assert config.defaults.max_turns == 100
    assert (config.parser.format, config.parser.several_calls) == ("xml", "first")
    assert config.rubric.weights.task_completion == 0.8
    assert list(config.actions) == ["left", "done"]
    assert config.actions["done"].tool is None
    own = load(tmp_path, SMALL + "defaults: {max_turns: 3, time_limit: 9.5}\n")
    assert (own.defaults.max_turns, own.defaults.time_limit) == (3, 9.5)


def test_json_is_yaml_too(tmp_path):
    config = load(
        tmp_path, json.dumps({"system_prompt": "a", "action_mappings": {"a": {"_tool": "b"}}}), "c.json"
    )
    assert config.actions["a"].tool == "b"


def test_words_of_old_yaml_are_texts(tmp_path):
    actions = (
        "action_mappings: {on: {_tool: m, a: yes, b: 2024-01-01, c: 1e3, d: 0x10, e: ~, f: True, g: 010}}\n"
    )
    sources = load(tmp_path, f"system_prompt: a\n{actions}").actions["on"].sources
    values = {name: source.value for name, source in sources.items()}
    assert values == {"a": "yes", "b": "2024-01-01", "c": 1000.0, "d": 16, "e": None, "f": True, "g": 10}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (PRINTED + "defalts: {}\n", r"^FILE:31: defalts: no such setting\. Did you mean defaults\?$"),
        (PRINTED.replace("xml_weight: 0.6", "xml_wait: 0.6"), r"^FILE:15: parser\.xml_wait: .* xml_weight\?"),
        (PRINTED.replace("0.8", "-0.8"), r"^FILE:28: rubric\.weights\.task_completion: is -0\.8; .*>= 0"),
        (PRINTED.replace("0.8", ".inf"), r'^FILE:28: .*is "\.inf"; expected a number'),
        (PRINTED.replace("0.8", "1e999"), r"^FILE:28: 1e999 is out of range"),
        (PRINTED.replace("task_completion: 0.8", "thinking_quality: 1"), r"^FILE:28: .*no such setting"),
        (PRINTED.replace("use_thinking: true", "use_thinking: maybe"), r"^FILE:14: .*expected true or false"),
        (SMALL + "defaults: {max_turns: true}\n", r"^FILE:3: defaults\.max_turns: is true; .*whole number"),
        (SMALL + "rubric: {weights: {tool_execution: 0}}\n", r"one of the weights must be above 0"),
        (SMALL + "parser: {xml_weight: 0, action_weight: 0}\n", r"one of them must be above 0"),
        ("system_prompt: a\n", r"^FILE: action_mappings: must name at least one action"),
        (ACTIONS, r"^FILE: system_prompt: must tell the model"),
        ("", r"^FILE:1: expected keys and values"),
        ("- a\n", r"^FILE:1: expected keys and values"),
        ("job: {name: a\n", r"^FILE:2:1: not valid YAML: "),
        ("a: b: c\n", r"^FILE:1:5: not valid YAML: .* A text with a colon needs quotes\."),
        ("a:\n\tb: c\n", r"^FILE:2:1: not valid YAML: .* Indent with spaces"),
        (SMALL + "system_prompt: b\n", r"^FILE:3: the key 'system_prompt' is there twice \(first: FILE:1\)"),
        (SMALL + "1: 2\n", r"^FILE:3: a key is a text; put '1' in quotes"),
        (SMALL + "job: !!python/object:os.system {}\n", r"^FILE:3: the tag .* is not allowed"),
        ("a: &a [*a]\n", r"^FILE: its lists or tables are nested too deeply"),
        ("a: \x00\n", r"^FILE: not valid YAML"),
        (
            "a: &a [x,x,x,x,x,x,x,x,x]\n"
            + "".join(
                f"{n}: &{n} [*{p},*{p},*{p},*{p},*{p},*{p},*{p},*{p},*{p}]\n"
                for p, n in itertools.pairwise("abcdefg")
            ),
            r"more than 100000 values",
        ),
    ],
)
def test_mistakes(tmp_path, text, told):
    message = refused(tmp_path, text)
    assert re.search(told, message), message


ACTION_MISTAKES = {
    "{x: 1}": r"FILE:3: action_mappings\.a\._tool: required",
    "move": r"action_mappings\.a: expected a table",
    "{_tool: setup}": r"action_mappings\.a\._tool: setup prepares or grades",
    "{_tool: evaluate}": r"_tool: evaluate prepares or grades",
    "{_tool: 5}": r"_tool: is 5; expected the name of an MCP tool",
    "{_tool: m, _parse: {}}": r"a\._parse: no such key\. Did you mean _parser\?",
    "{_tool: m, _parser: {position: [x]}}": r"_parser\.position: no such key\. Did you mean positional\?",
    "{_tool: m, _parser: {positional: x}}": r"positional: is \"x\"; expected a list of names",
    "{_tool: m, _parser: {positional: [x, x]}}": r"positional\.1: 'x' is there twice",
    "{_tool: m, _parser: {positional: [5]}}": r"positional\.0: 5 is no name",
    "{_tool: m, x: {b: 1}}": r"a\.x: expected static, from_arg or from_args",
    "{_tool: m, x: {from_args: [b], static: 1}}": r"a\.x: it has static and from_args; keep one",
    "{_tool: m, x: {from_arg: b, defualt: 1}}": r"a\.x\.defualt: no such key\. Did you mean default\?$",
    "{_tool: m, x: {from_arg: [b]}}": r"a\.x\.from_arg: \['b'\] is no name of an argument",
    "{_tool: m, x: {from_arg: b, use: true}}": r"a\.x\.use: .*Did you mean use_context\?",
    "{_tool: m, x: {from_arg: b, use_context: true}}": r"use_context: there is no transform",
    "{_tool: m, x: {from_arg: b, transform: 5}}": r"transform: is 5; expected an expression",
    "{_tool: m, x: {from_arg: b, transform: 'open(x)'}}": r"transform: 'open' is no function",
    "{_tool: m, x: {from_arg: b, transform: '().__class__'}}": r"transform: an attribute is not allowed",
    "{_tool: m, x: {from_arg: b, transform: 'lambda x, ctx: 1'}}": r"\(ctx\) needs use_context: true",
    "{_tool: m, x: {from_args: []}}": r"from_args: is an empty list; must not be empty",
    "{_tool: m, x: {from_args: [b, c], defaults: [1]}}": r"defaults: expected a list of 2 values",
}


@pytest.mark.parametrize("action", ACTION_MISTAKES)
def test_mistakes_in_actions(tmp_path, action):
    message = refused(tmp_path, f"system_prompt: hello\naction_mappings:\n  a: {action}\n")
    assert message.startswith("FILE:3: ")
    assert re.search(ACTION_MISTAKES[action], message), message


def test_a_name_that_cannot_be_called(tmp_path):
    assert "'go left' is no name" in refused(
        tmp_path, "system_prompt: a\naction_mappings: {go left: {_tool: m}}\n"
    )


def test_every_mistake_is_named_at_once(tmp_path):
    text = "promt: a\nparser: {format: xlm}\naction_mappings:\n  a: {_tool: setup}\n  b: {}\n"
    message = refused(tmp_path, text)
    assert message.startswith("4 problems")
    for part in (
        "FILE:1: promt",
        "FILE:2: parser.format",
        "FILE:4: action_mappings.a",
        "FILE:5: action_mappings.b",
    ):
        assert part in message


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="there is no file"):
        load_gym_config(tmp_path / "none.yaml")
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"a: b\nc: \xe9\n")
    with pytest.raises(ConfigError, match=r"latin\.yaml:2: not UTF-8"):
        load_gym_config(path)


@given(st.text(alphabet="ab:-[]{}&*!|>'\"#\n %@`,?1.~", max_size=40))
def test_any_text_is_read_or_refused_in_words(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("any") / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(str(path))):
        load_gym_config(path)


def test_the_schema_is_closed_and_knows_the_mapping():
    schema = json.loads(json.dumps(gym_schema()))
    for part in (schema, *schema["$defs"].values()):
        assert part["additionalProperties"] is False
        assert all("description" in field for field in part["properties"].values())
    assert schema["properties"]["action_mappings"]["additionalProperties"] == {"$ref": "#/$defs/ActionTable"}
    action = schema["$defs"]["ActionTable"]
    assert action["required"] == ["_tool"]
    kinds = action["patternProperties"]["^[^_]"]["oneOf"]
    names = [kind["$ref"].rpartition("/")[2] for kind in kinds if "$ref" in kind]
    keys = {key for name in names for key in schema["$defs"][name]["properties"]}
    assert keys == {"static", "from_arg", "default", "transform", "use_context", "from_args", "defaults"}


def test_the_schema_accepts_what_is_printed_and_no_mistakes():
    jsonschema = pytest.importorskip("jsonschema")
    schema = jsonschema.Draft202012Validator(gym_schema())
    jsonschema.Draft202012Validator.check_schema(gym_schema())
    schema.validate(yaml.safe_load(PRINTED))
    for action in ({}, {"_tool": "setup"}, {"_tool": "m", "x": {"fromarg": 1}}, {"_tool": "m", "_parse": {}}):
        assert not schema.is_valid({"action_mappings": {"a": action}})


def test_the_reward_is_the_weighted_mean_of_the_parts():
    parts = {"task_completion": 1.0, "tool_execution": 0.5, "format_compliance": 0.0}
    weights = WeightsConfig(task_completion=0.8, tool_execution=0.1, format_compliance=0.1)
    assert score(parts, weights) == pytest.approx(0.85)
    assert score(
        parts, WeightsConfig(task_completion=8, tool_execution=1, format_compliance=1)
    ) == pytest.approx(0.85)
    assert score(parts, WeightsConfig(task_completion=3)) == 1.0
    assert score(dict.fromkeys(parts, 1.0), weights) == pytest.approx(1.0)


def test_weights_that_are_written_replace_all_of_the_default():
    config = GymConfig.model_validate(
        {
            "system_prompt": "a",
            "action_mappings": {"a": {"_tool": "b"}},
            "rubric": {"weights": {"task_completion": 2}},
        }
    )
    assert config.rubric.weights == WeightsConfig(task_completion=2)
