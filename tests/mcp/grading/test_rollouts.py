"""Graders in complete rollouts, on a real server that does not grade."""

import asyncio
import json
import statistics
import sys

import pytest
from tests.mcp.environment.scripted import Scripted, native
from tests.mcp.gym import gym_config, mapping
from tests.mcp.workdir.test_folder import NOTES

from buckeye.envs.settings import WorkerSettings
from buckeye.errors import UsageError
from buckeye.mcp.config import load_gym_config
from buckeye.mcp.environment import McpEnvironment, load_environment
from buckeye.mcp.tasks.task_schema import McpTask
from buckeye.workers.loading import open_environment

ACTIONS = {"note": mapping("add", "text"), "run": mapping("run", "code")}
SERVERS = {"notes": {"command": sys.executable, "args": [NOTES]}}


@pytest.fixture
def make():
    def make(grade=None, settings=None, **fields):
        given = {
            "id": "one",
            "prompt": "Note the answer.",
            "mcp_config": SERVERS,
            "metadata": {"answer": "42"},
        }
        task = McpTask.model_validate(given | {"grade": grade} | fields)
        config = gym_config(ACTIONS, **{"defaults": {"max_turns": 4, "tool_timeout": 3.0}} | (settings or {}))
        return McpEnvironment(config, {"train": [task]})

    return make


def play(environment, *replies):
    (task,) = environment.tasks("train")
    return asyncio.run(environment.rollout(task, Scripted(*replies)))


def test_completion_is_the_weighted_mean_of_all_graders(make, wording):
    """The weights are 3, 1 and 1; the mean of the scores 1, 0 and 1 is 4/5."""
    environment = make(
        [
            {"state": {"file": "notes.txt", "exact": "{metadata.answer}"}, "weight": 3},
            {"calls": {"at_most": 0}},
        ],
        {"grade": [{"reply": {"number": 42}}, {"calls": {"at_most": 9}}]},  # the task's calls count instead
    )
    outcome = play(environment, '<tool>note("42")</tool>', "It is 42.")
    assert (outcome.reward, outcome.stop_reason) == (pytest.approx(0.8), "answered")
    scores = {name: outcome.components[f"grade/{name}"] for name in ("state", "calls", "reply")}
    assert scores == {"state": 1.0, "calls": 0.0, "reply": 1.0}
    assert outcome.explanations["grade/calls"] == wording


def test_reply_without_call_is_an_answer_if_it_is_graded(make):
    outcome = play(make({"reply": {"exact": "42"}}), "42")
    assert (outcome.reward, outcome.stop_reason) == (1.0, "answered")


def test_native_arguments_that_are_not_an_object_are_reported_to_the_model(make):
    environment = make({"reply": {"exact": "42"}}, {"parser": {"format": "tools"}})
    outcome = play(environment, native("note", 5), native("note", [1]), "42")
    assert (outcome.reward, outcome.error) == (1.0, None)


@pytest.mark.slow  # starts many servers
def test_hanging_a_tool_has_the_reward_of_failing(make):
    """One of four rollouts solves the task, and the others either give up or hang their tool.

    In both cases no rollout is left out, and the mean reward is 1/4.
    """
    environment = make({"state": {"file": "notes.txt", "exact": "42"}}, {"defaults": {"tool_timeout": 1.0}})
    good = ['<tool>note("42")</tool>', "<tool>done()</tool>"]
    for bad in (["<tool>done()</tool>"], ['<tool>run("time.sleep(1000)")</tool>', "<tool>done()</tool>"]):
        outcomes = [play(environment, *replies) for replies in (good, bad, bad, bad)]
        assert [outcome.error for outcome in outcomes] == [None] * 4
        assert statistics.fmean(outcome.reward for outcome in outcomes) == 0.25
    assert outcomes[-1].components["server_lost_by_call"] == 1.0
    assert "time.sleep(1000)" in outcomes[-1].explanations["server_lost_by_call"]


@pytest.mark.slow  # starts many servers
def test_grader_that_fails_only_after_the_model_scores_0_and_a_broken_one_is_an_error(make, tmp_path):
    (tmp_path / "check.py").write_text(
        "def careless(workdir, **_):\n"
        "    note = workdir / 'notes.txt'\n"
        "    return float(note.read_text()) if note.exists() else 0.0\n"
        "def broken(**_):\n    raise ValueError('always')\n"
    )
    wrong = ['<tool>note("no number")</tool>', "<tool>done()</tool>"]
    outcome = play(make({"python": f"{tmp_path}/check.py:careless"}), *wrong)
    assert (outcome.reward, outcome.components["graders_failed"]) == (0.0, 1.0)
    assert "float" in outcome.explanations["grade/python"]
    outcome = play(make({"python": f"{tmp_path}/check.py:broken"}), *wrong)
    assert (outcome.reward, outcome.stop_reason) == (None, "evaluate_failed")
    assert "ValueError: always" in outcome.error


@pytest.mark.e2e
def test_explanations_of_graders_are_equal_in_a_worker_process(tmp_path):
    task = {
        "prompt": "Note the answer.",
        "mcp_config": SERVERS,
        "grade": [{"state": {"file": "notes.txt", "contains": "42"}}, {"reply": {"number": 42}}],
    }
    config = gym_config(ACTIONS).model_dump(mode="json", by_alias=True)
    (tmp_path / "tasks.json").write_text(json.dumps(task))
    (tmp_path / "gym.yaml").write_text(json.dumps(config))
    arguments = {"dataset": str(tmp_path / "tasks.json"), "config_path": str(tmp_path / "gym.yaml")}
    replies = ('<tool>note(text="41")</tool>', "It is 42.")
    there = open_environment("mcp", arguments, WorkerSettings(isolation="process"))
    try:
        outcome = asyncio.run(there.rollout(there.tasks("train")[0], Scripted(*replies)))
    finally:
        asyncio.run(there.close())
    assert outcome.reward == 0.5
    assert outcome.explanations == play(load_environment(**arguments), *replies).explanations
    assert outcome.explanations["grade/state"] == "expected text with '42', found '41'"


CONFIG = """\
system_prompt: Note.
action_mappings:
  note: {_tool: note}
grade:
  reply:
    numbr: 5
"""


def test_invalid_graders_in_files_are_refused(tmp_path, refusal):
    config, tasks = tmp_path / "gym.yaml", tmp_path / "tasks.json"
    config.write_text(CONFIG)
    with refusal(UsageError):
        load_gym_config(config)
    config.write_text(CONFIG.partition("grade")[0])
    base = '{"id": "a", "prompt": "p", "mcp_config": {"s": {"url": "http://localhost/mcp"}}'
    for grade in (
        "",
        ', "grade": {"reply": {"exat": 1}}',
        ', "grade": {"state": {"file": "x"}}',
        ', "grade": {"reply": {"exact": "{metadata.b}"}}',
    ):
        tasks.write_text(base + grade + "}")
        with refusal(UsageError):
            load_environment(str(tasks), str(config))
    tasks.write_text(base + ', "grade": {"reply": {"exact": 1}}}')
    load_environment(str(tasks), str(config))


def test_graders_of_calls_that_no_action_makes_are_refused_with_their_line(tmp_path, refusal):
    config, tasks = tmp_path / "gym.yaml", tmp_path / "tasks.jsonl"
    actions = "system_prompt: Note.\naction_mappings:\n  note: {_tool: add, text: {from_arg: text}}\n"
    config.write_text(actions)
    base = '{"id": "%s", "prompt": "p", "mcp_config": {"s": {"url": "http://localhost/mcp"}}, "grade": %s}\n'
    for grade in (
        {"calls": {"tool": "ad"}},
        {"calls": {"tool": "note"}},
        {"result": {"tool": "list", "contains": "x"}},
        {"calls": {"tool": "add", "arguments": {"txt": "x"}}},
        {"calls": {"in_order": [{"tool": "add", "matching": {"line": {"exact": 1}}}]}},
    ):
        tasks.write_text(base % ("a", '{"calls": {"tool": "add"}}') + base % ("b", json.dumps(grade)))
        with refusal(UsageError) as refused:
            load_environment(str(tasks), str(config))
        assert refused.value.code == "BK-GRADER"
    tasks.write_text(base % ("a", '{"reply": {"exact": 1}}'))
    config.write_text(f"{actions}grade: {{calls: {{tool: ad}}}}\n")
    with refusal(UsageError):
        load_environment(str(tasks), str(config))
    config.write_text(f"{actions}grade: {{calls: {{tool: delete, at_most: 0}}}}\n")
    load_environment(str(tasks), str(config))
