"""Rollouts against real servers, with scripted policies."""

import asyncio
import json
import sys
import uuid
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from pydantic import ValidationError
from tests.mcp.environment.leaks import assert_none_left
from tests.mcp.environment.scripted import Scripted, native
from tests.mcp.gym import gym_config, mapping

from buckeye.errors import UsageError
from buckeye.mcp import environment as environment_module
from buckeye.mcp import rollout_resources
from buckeye.mcp.client.errors import StartError
from buckeye.mcp.environment import McpEnvironment
from buckeye.mcp.tasks.task_schema import McpTask
from buckeye.workers import environment as worker_environment

RAW = str(Path(__file__).with_name("raw_server.py"))


@pytest.fixture
def marker():
    name = f"marker-{uuid.uuid4()}"
    yield name
    assert_none_left(name)


def task(marker, way="", **fields):
    given = {
        "id": "one",
        "prompt": "Win.",
        "mcp_config": {"board": {"command": sys.executable, "args": [RAW, way], "env": {"MARKER": marker}}},
        "setup_tool": {"name": "setup"},
        "evaluate_tool": {"name": "evaluate"},
        "metadata": {"level": 3},
    }
    return McpTask.model_validate(given | fields)


def config(**fields):
    limits = {"max_turns": 4, "setup_timeout": 60.0, "tool_timeout": 60.0}
    return gym_config({"act": mapping("act", "text")}, **{"defaults": limits} | fields)


def play(played, policy, settings=None):
    environment = McpEnvironment(settings or config(), {"train": [played]})
    (given,) = environment.tasks("train")
    return asyncio.run(environment.rollout(given, policy))


WIN, DONE = '<tool>act("win")</tool>', "<tool>done()</tool>"


@pytest.mark.smoke
def test_rollout_of_a_won_task(marker, wording):
    policy = Scripted(WIN, DONE)
    outcome = play(task(marker), policy)
    assert (outcome.reward, outcome.stop_reason, outcome.error) == (1.0, "done", None)
    assert outcome.components["n_turns"] == 2.0
    assert outcome.components["tool_calls"] == 1.0
    assert outcome.components["calls"] == 3.0  # the server's own count: setup, act, evaluate
    assert [message["role"] for message in policy.seen] == ["system", "user", "assistant", "user"]
    assert policy.seen[1]["content"] == wording
    assert policy.last_read == wording


def test_reward_is_the_weighted_mean_of_its_parts(marker):
    """One of two calls fails to bind, and two of three replies are flawless.

    The reward is the weighted mean of 1, 1/2 and the mean format score.
    """
    settings = config(
        rubric={"weights": {"task_completion": 6.0, "tool_execution": 3.0, "format_compliance": 1.0}}
    )
    outcome = play(task(marker), Scripted('<tool>act("a", "b")</tool>', WIN, DONE), settings)
    parts = outcome.components
    assert (parts["task_completion"], parts["tool_execution"]) == (1.0, 0.5)
    assert parts["format_compliance"] == 1.0
    assert outcome.reward == pytest.approx((6.0 * 1 + 3.0 * 0.5 + 1.0 * 1) / 10)
    assert (parts["tool_calls"], parts["tool_errors"]) == (2.0, 1.0)


@pytest.mark.parametrize(
    ("way", "replies", "stop", "reward"),
    [
        ("", [WIN] * 4, "turn_limit", 1.0),
        ("", [WIN, ("length", "<tool>act(")], "truncated", 1.0),
        ("", [WIN, ("length", "")], "truncated", 1.0),
        ("", ['<tool>act("lose")</tool>', DONE], "done", 0.0),
        ("", ["I would like to win.", DONE], "done", 0.0),
        ("", [], "time_limit", 0.0),
        ("ends", [WIN], "environment_done", 1.0),
        ("grade", [DONE], "done", 0.25),
        ("bool", [DONE], "done", 1.0),
        ("json-text", [DONE], "done", 0.75),
        ("bare-number", [DONE], "done", 0.125),
        ("score-and-reward", [DONE], "done", 0.5),
    ],
)
def test_rollout_is_graded_for_every_stop_reason_and_reward_format(marker, way, replies, stop, reward):
    limits = {"max_turns": 4} if replies else {"max_turns": 4, "time_limit": 1e-6}
    outcome = play(task(marker, way), Scripted(*replies), config(defaults=limits))
    assert (outcome.reward, outcome.stop_reason, outcome.error) == (reward, stop, None)


@pytest.mark.parametrize(
    ("way", "stop"),
    [
        ("die-in-start", "start_failed"),
        ("setup-fails", "setup_failed"),
        ("hang-in-setup", "setup_failed"),
        ("evaluate-fails", "evaluate_failed"),
        ("hang-in-evaluate", "evaluate_failed"),
        ("nan", "evaluate_failed"),
        ("no-reward", "evaluate_failed"),
        ("failed-inside", "evaluate_failed"),
    ],
)
def test_failed_environment_gives_an_error_and_no_reward(marker, way, stop, wording):
    seconds = {"hang-in-setup": {"setup_timeout": 2.0}, "hang-in-evaluate": {"tool_timeout": 1.0}}
    limits = {"max_turns": 4, "setup_timeout": 60.0, "tool_timeout": 60.0} | seconds.get(way, {})
    outcome = play(task(marker, way), Scripted(WIN, WIN, DONE), config(defaults=limits))
    assert (outcome.reward, outcome.stop_reason) == (None, stop)
    assert outcome.error == wording


INVALID = {
    "action": ({}, {"action_mappings": {"act": mapping("nothing_such", "text")}}),
    "setup": ({"setup_tool": {"name": "nothing_such"}}, {}),
    "evaluate": ({"evaluate_tool": {"name": "nothing_such"}}, {}),
    "grader": ({"grade": {"state": {"tool": "nothing_such", "contains": "x"}}}, {}),
    "calls": ({"grade": {"calls": {"tool": "atc"}}}, {}),
    "call in order": ({"grade": {"calls": {"in_order": [{"tool": "act"}, {"tool": "atc"}]}}}, {}),
    "result": ({"grade": {"result": {"tool": "atc", "contains": "x"}}}, {}),
    "argument of evaluate": (
        {"evaluate_tool": {"name": "act", "arguments": {"text": "win", "txt": "win"}}},
        {"action_mappings": {"recall": mapping("recall")}},
    ),
    "argument of grader": (
        {"grade": {"state": {"tool": "act", "arguments": {"wrd": "win"}, "contains": "x"}}},
        {},
    ),
    "variable": ({"mcp_config": {"board": {"command": "x", "env": {"KEY": "$NO_SUCH_VARIABLE"}}}}, {}),
    "program": ({"mcp_config": {"board": {"command": "no-such-program"}}}, {}),
    "address": ({"mcp_config": {"board": {"url": "http:///mcp"}}}, {}),
}


@pytest.mark.parametrize("way", INVALID)
def test_task_that_cannot_run_is_refused_and_not_retried(marker, way, wording, refusal):
    fields, settings = INVALID[way]
    policy = Scripted(WIN, DONE)
    outcome = play(task(marker, **fields), policy, config(**settings))
    boundary = "config" if way == "action" else "task"
    assert (outcome.reward, outcome.boundary, policy.seen) == (None, boundary, [])
    assert outcome.error == wording
    environment = McpEnvironment(config(shared_state=True, **settings), {"train": [task(marker, **fields)]})
    with refusal(UsageError):
        asyncio.run(environment.check_isolation())


def test_a_grader_may_limit_the_calls_of_a_tool_that_does_not_exist(marker):
    fields = {"grade": {"calls": {"tool": "atc", "at_most": 0}}}
    outcome = play(task(marker, **fields), Scripted(WIN, DONE), config())
    assert outcome.error is None


@pytest.mark.parametrize(("role", "way"), [("setup", "setup-fails"), ("evaluate", "evaluate-fails")])
def test_task_call_with_missing_arguments_is_not_retried(marker, role, way):
    fields = {f"{role}_tool": {"name": "act"}}
    settings = config(action_mappings={"recall": mapping("recall")})
    outcome = play(task(marker, "refuses-arguments", **fields), Scripted(DONE), settings)
    assert (outcome.reward, outcome.boundary) == (None, "task")
    retried = play(task(marker, way), Scripted(DONE))
    assert (retried.reward, retried.boundary) == (None, None)


def test_evaluation_that_the_model_breaks_scores_0_also_if_its_arguments_look_wrong(marker):
    settings = config(action_mappings={"recall": mapping("recall")})
    evaluated = task(marker, "breaks-evaluation", evaluate_tool={"name": "act"})
    good = play(evaluated, Scripted(DONE), settings)
    assert (good.error, good.reward) == (None, 1.0)
    broken = play(evaluated, Scripted("<tool>recall()</tool>", DONE), settings)
    assert (broken.error, broken.reward, broken.components["graders_failed"]) == (None, 0.0, 1.0)


def test_servers_of_all_sets_are_checked_together_and_faults_are_logged(monkeypatch, caplog):
    barrier = asyncio.Barrier(3)

    @asynccontextmanager
    async def opened(opening, _):
        await barrier.wait()
        if opening.id == "c":
            await asyncio.sleep(60)
        raise StartError("busy")
        yield

    monkeypatch.setattr(rollout_resources, "open_workdir", opened)
    monkeypatch.setattr(rollout_resources, "_CHECK_SECONDS", 0.5)
    tasks = [task(name).model_copy(update={"id": name}) for name in "abc"]
    asyncio.run(rollout_resources.check_servers(tasks, config()))
    found = sorted((record.levelname, record.args[0]) for record in caplog.records)
    assert found == [("WARNING", "a"), ("WARNING", "b"), ("WARNING", "c")]


def test_worker_waits_longer_than_the_checks_take():
    checks = rollout_resources._CHECK_SECONDS + environment_module._ISOLATION_SECONDS
    assert checks + 60 <= worker_environment._ISOLATION_SECONDS


@pytest.mark.parametrize(
    ("way", "read", "reward"),
    [
        ("hang-in-call", "Error: act: it returned no result in time.", 0.0),
        ("die-in-call", "Error: act: its server exited.", 0.0),
        ("wrong-shape", "Error: act: its result cannot be used.", 1.0),
        ("flood", "Error: act: its output was too large, so its server was killed.", 0.0),
        ("tool-gone", "Error: act: it cannot be called.", 1.0),
    ],
)
def test_call_that_breaks_the_server_is_reported_to_the_model_and_graded(marker, way, read, reward):
    """A fresh session works, so the call broke the server; an error would keep the rollout from training."""
    limits = {"max_turns": 4, "setup_timeout": 60.0, "tool_timeout": 1.0 if way == "hang-in-call" else 60.0}
    policy = Scripted(*[WIN] * (2 if way == "tool-gone" else 1), DONE)
    outcome = play(task(marker, way), policy, config(defaults=limits))
    assert (outcome.reward, outcome.stop_reason, outcome.error) == (reward, "done", None)
    assert policy.last_read == f"<result>\n{read}\n</result>"
    assert outcome.components["server_lost_by_call"] == 1.0
    ending = " with exit code 3" if way == "die-in-call" else ""
    lost = f"act(text='win'){read.removeprefix('Error: act')[:-1]}{ending}"
    assert outcome.explanations["server_lost_by_call"] == lost


def test_lost_server_refuses_further_calls(marker, wording):
    policy = Scripted(WIN, WIN, DONE)
    outcome = play(task(marker, "die-in-call"), policy)
    assert policy.last_read == wording
    assert outcome.components["server_lost_by_call"] == 2.0
    assert "evaluate" in outcome.explanations["evaluate_tool"]


def test_failed_call_is_an_error_if_a_fresh_session_fails_too(marker, tmp_path, wording):
    """The server starts only once, so the fresh session fails too: the model is not to blame."""
    once = f'test -e {tmp_path}/started && exit 1; touch {tmp_path}/started; exec "$$0" "$$@"'
    server = {
        "command": "/bin/sh",
        "args": ["-c", once, sys.executable, RAW, "die-in-call"],
        "env": {"MARKER": marker},
    }
    outcome = play(task(marker, mcp_config={"board": server}), Scripted(WIN, DONE))
    assert (outcome.reward, outcome.stop_reason) == (None, "session_lost")
    assert outcome.error == wording


def test_plain_text_after_a_successful_call_is_an_answer(marker):
    settings = config(
        rubric={"weights": {"task_completion": 1.0, "format_compliance": 1.0}}, parser={"use_thinking": False}
    )
    outcome = play(task(marker), Scripted(WIN, "I have won."), settings)
    assert (outcome.reward, outcome.stop_reason) == (1.0, "answered")
    assert outcome.components["format_compliance"] == 1.0


@pytest.mark.parametrize("name", ["setup", "evaluate", "environment", "nonsense"])
def test_only_mapped_tools_can_be_reached(marker, name):
    policy = Scripted(f"<tool>{name}()</tool>", DONE)
    outcome = play(task(marker), policy)
    assert name in policy.last_read
    assert "act" in policy.last_read  # the error lists the mapped tools
    assert outcome.components["calls"] == 2.0  # setup and evaluate, once each


def test_grading_tool_cannot_be_mapped(marker, refusal):
    settings = config(action_mappings={"peek": {"_tool": "recall"}})
    graded = task(marker, evaluate_tool={"name": "recall"})
    with refusal(UsageError):
        McpEnvironment(settings, {"train": [graded]})


def test_setup_tool_can_be_mapped(marker):
    prepared = task(marker, setup_tool=[{"name": "setup"}, {"name": "act"}])
    McpEnvironment(config(), {"train": [prepared]})


def test_mapping_to_unknown_tool_lists_the_tools(marker, wording):
    settings = config(action_mappings={"act": {"_tool": "acts"}})
    outcome = play(task(marker), Scripted(), settings)
    assert outcome.stop_reason == "start_failed"
    assert outcome.error == wording


def test_long_results_are_cut_with_a_note(marker):
    settings = config(defaults={"max_turns": 4, "max_result_chars": 100})
    policy = Scripted(WIN, DONE)
    outcome = play(task(marker, "long-result"), policy, settings)
    assert policy.last_read == f"<result>\n{'ab' * 50}\n(cut: 99900 more characters)\n</result>"
    assert outcome.components["cut_characters"] == 99900.0


def test_images_are_not_shown_and_counted(marker, wording):
    policy = Scripted(WIN, DONE)
    outcome = play(task(marker, "image"), policy)
    assert policy.last_read == wording
    assert outcome.components["dropped_image"] == 1.0


def test_native_tool_calls(marker, wording):
    settings = config(parser={"format": "tools"}, system_prompt="Act.")
    policy = Scripted(native("act", json.dumps({"text": "win"})), "I have won.")
    outcome = play(task(marker), policy, settings)
    assert (outcome.reward, outcome.stop_reason) == (1.0, "answered")
    act, done = (tool["function"] for tool in policy.tools)
    assert (act["name"], act["description"]) == wording
    assert act["parameters"]["properties"] == {"text": {"type": "string"}}
    assert act["parameters"]["required"] == ["text"]
    assert (done["name"], done["parameters"]["properties"]) == ("done", {})
    answer = policy.seen[-1]
    assert (answer["role"], answer["tool_call_id"], answer["content"]) == wording


def test_every_native_call_of_a_reply_gets_a_result(marker):
    settings = config(parser={"format": "tools", "several_calls": "first"}, system_prompt="Act.")
    first, second = native("act", '{"text": "win"}', "a"), native("act", '{"text": "lose"}', "b")
    both = {"role": "assistant", "content": "", "tool_calls": first["tool_calls"] + second["tool_calls"]}
    policy = Scripted(both, "Done.")
    outcome = play(task(marker), policy, settings)
    assert [m["tool_call_id"] for m in policy.seen if m["role"] == "tool"] == ["a", "b"]
    assert "first" in policy.last_read
    assert outcome.reward == 1.0


def test_variables_are_resolved_when_the_session_opens(marker, monkeypatch):
    monkeypatch.setenv("BUCKEYE_API_KEY", marker)
    server = {"command": sys.executable, "args": [RAW], "env": {"MARKER": "$buckeye_API_KEY"}}
    assert play(task(marker, mcp_config={"board": server}), Scripted(DONE)).reward == 0.0


def test_key_in_the_output_of_a_server_is_not_in_the_error(marker, monkeypatch, wording):
    monkeypatch.setenv("GIVEN_KEY", "sesame-open")
    server = {
        "command": "/bin/sh",
        "args": ["-c", 'echo "the key is $$GIVEN" >&2; exit 3'],
        "env": {"GIVEN": "${GIVEN_KEY}", "MARKER": marker},
    }
    outcome = play(task(marker, mcp_config={"board": server}), Scripted(DONE))
    assert outcome.stop_reason == "start_failed"
    assert outcome.error == wording
    assert "sesame" not in outcome.error


def test_deeply_nested_arguments_are_reported_to_the_model(marker, wording):
    deep = '{"text": ' + "[" * 500 + "]" * 500 + "}"
    given = {"act": {"_tool": "act", "text": {"from_arg": "text", "transform": "x"}}}
    settings = config(parser={"format": "tools"}, action_mappings=given)
    policy = Scripted(native("act", deep), native("done", "{}"))
    outcome = play(task(marker), policy, settings)
    assert (outcome.stop_reason, outcome.error) == ("done", None)
    assert policy.seen[-1]["content"] == wording


def test_two_servers_of_one_task(marker, wording):
    raw = {"command": sys.executable, "args": [RAW], "env": {"MARKER": marker}}
    two = {
        "mcp_config": {"one": raw, "two": raw},
        "setup_tool": [{"name": "one/setup"}, {"name": "two/setup"}],
    }
    settings = config(action_mappings={"act": mapping("two/act", "text")})
    for server, reward in (("one", 0.0), ("two", 1.0)):
        graded = task(marker, evaluate_tool={"name": f"{server}/evaluate"}, **two)
        assert play(graded, Scripted(WIN, DONE), settings).reward == reward
    outcome = play(task(marker, mcp_config=two["mcp_config"]), Scripted(), settings)
    assert outcome.boundary == "task"
    assert outcome.error == wording
    for tool in ("one/setup", "two/evaluate"):
        with pytest.raises(ValidationError, match="prepares or grades the environment"):
            config(action_mappings={"act": {"_tool": tool}})


def test_tasks_have_messages_and_data(marker, refusal):
    other = task(marker, id="two", setup_tool={"name": "setup", "arguments": {"seed": 2}})
    same = task(marker, id="three")
    environment = McpEnvironment(config(), {"train": [task(marker), other, same]})
    given, another, again = environment.tasks("train")
    assert given.data == {"level": 3, "start": again.data["start"]}
    assert another.data["start"] != given.data["start"]
    assert given.messages[-1] == {"role": "user", "content": "Win."}
    with refusal(KeyError):
        environment.tasks("eval")
