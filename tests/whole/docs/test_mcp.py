"""What docs/mcp.md shows is accepted as it stands, and comes out as it says."""

import re

import pytest
from tests.places import ROOT

from buckeye.config.yaml_source import read_yaml
from buckeye.mcp.actions.check import compile_actions
from buckeye.mcp.actions.literals import read_call
from buckeye.mcp.actions.parser import parse_reply
from buckeye.mcp.config import DefaultsConfig, ParserConfig, RubricConfig, load_gym_config
from buckeye.mcp.tasks.files import read_tasks

PAGE = (ROOT / "docs" / "mcp.md").read_text(encoding="utf-8")


def block(language):
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.S | re.M)
    return found


def table(heading):
    """The rows of the table with this first line: two cells each, without back-quotes."""
    lines = PAGE.split(f"{heading}\n|---|---|\n")[1].split("\n\n")[0].splitlines()
    rows = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in lines]
    return [(first.strip("`"), second.strip("`")) for first, second in rows]


def test_the_task_and_its_fields(tmp_path):
    path = tmp_path / "tasks.json"
    path.write_text(block("json"))
    (task,) = read_tasks(path)
    assert task.id == "task-001"
    assert [name for name, _ in table("| field | |")] == list(type(task).model_fields)


def test_the_configuration_shows_the_defaults(tmp_path):
    path = tmp_path / "my-env.yaml"
    path.write_text(block("yaml"))
    config = load_gym_config(path)
    assert (config.parser, config.rubric, config.defaults) == (
        ParserConfig(),
        RubricConfig(),
        DefaultsConfig(),
    )
    assert list(config.actions) == ["move", "done"]


@pytest.mark.parametrize("written", [written for written, _ in table("| written | the argument is |")])
def test_every_form_of_the_mapping(tmp_path, written):
    path = tmp_path / "one.yaml"
    path.write_text(f"a:\n  _tool: tool\n  {written}\n")
    actions, problems = compile_actions(read_yaml(path).values)
    assert problems == []
    assert len(actions["a"].sources) == 1


@pytest.mark.parametrize(("reply", "expected"), table("| reply | is read as |"))
def test_replies(reply, expected):
    parsed = parse_reply(reply, ParserConfig(), ("move", "click", "say", "done"))
    if parsed.calls:
        (call,) = parsed.calls
        wanted = read_call(expected, 0)
        assert (call.name, list(call.args), call.kwargs) == (wanted.name, wanted.args, wanted.kwargs)
    else:
        assert str(parsed.problems[0]) == expected


@pytest.mark.parametrize(("reply", "expected"), table("| reply | score |"))
def test_scores(reply, expected):
    parsed = parse_reply(reply, ParserConfig(), ("move", "done"))
    assert parsed.format_score == pytest.approx(float(expected))
