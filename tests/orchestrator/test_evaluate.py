"""Evaluation metrics compared with hand-computed numbers."""

import asyncio
import json
import logging
from dataclasses import replace

import pytest

from buckeye.config.orchestrator import EvalEnvConfig
from buckeye.envs.base import Task
from buckeye.evaluation.rows import read_rows
from buckeye.monitor.log import SUCCESS
from buckeye.monitor.metrics import MetricsLog
from buckeye.orchestrator import evaluation, rollout_runner
from buckeye.orchestrator.environments import NamedEnvironment
from buckeye.orchestrator.evaluation import (
    EvalResult,
    evaluate,
)
from buckeye.orchestrator.evaluation_schedule import evaluate_all, evaluated_versions, write_evaluation
from buckeye.orchestrator.task_sampler import GroupTask
from tests.waiting import HANG

from .fakes import FakeEngine, LetterEnvironment, make_runner
from .made_rollouts import rollout


def result(by_task, n, components=lambda reward: {}):
    return EvalResult(
        env_name="e",
        all_rollouts=[
            rollout(
                reward, task_id=task, turns=(10,), components={} if reward is None else components(reward)
            )
            for task, rewards in by_task.items()
            for reward in rewards
        ],
        rollouts_per_example=n,
        seconds=12.3,
    )


def test_pass_at_k_is_unbiased():
    got = result({"a": [1, 0, 0, 0], "b": [1, 1, 0, 0]}, 4)
    assert got.pass_at(1) == pytest.approx((1 / 4 + 2 / 4) / 2)
    assert got.pass_at(2) == pytest.approx((1 - 3 / 6 + 1 - 1 / 6) / 2)
    assert got.pass_at(5) is None


def test_means_are_over_tasks_as_pass_at_1_is():
    """All four rollouts of one task succeed; of the other task one fails and three have no reward."""
    by_task = {"a": [1.0, 1.0, 1.0, 1.0], "b": [0.0, None, None, None]}
    got = result(by_task, 4, components=lambda reward: {"length": 10 * reward})
    assert sum(got.rewards) / len(got.rewards) == 0.8  # over rollouts
    assert got.pass_at(1) == got.mean_reward == 0.5
    metrics = got.metrics()
    assert (metrics["eval/e/avg@4"], metrics["eval/e/length"]) == (0.5, 5.0)
    assert "Avg@4=0.5000" in got.summary()
    nothing = result({}, 1).metrics()
    assert "eval/e/avg@1" not in nothing
    json.dumps(nothing, allow_nan=False)


def test_component_does_not_replace_a_measured_value():
    metrics = result({"a": [1.0]}, 1, components=lambda _: {"time": 7.0, "avg@1": 8.0, "x": 9.0}).metrics()
    assert (metrics["eval/e/time"], metrics["eval/e/avg@1"], metrics["eval/e/x"]) == (12.3, 1.0, 9.0)
    assert (metrics["eval/e/component/time"], metrics["eval/e/component/avg@1"]) == (7.0, 8.0)


def test_files_and_metrics_have_the_same_mean(tmp_path):
    asyncio.run(write_evaluation(tmp_path, result({"a": [1.0, 1.0], "b": [0.0, None]}, 2), {}))
    figures = json.loads((tmp_path / "e.json").read_text())
    assert figures["mean_reward"] == figures["exact"] == figures["eval/e/avg@2"] == 0.5


def test_summary_has_the_documented_form():
    got = result({"a": [1.0, 0.0], "b": [0.5, 0.5]}, 2)
    assert got.summary() == (
        "Evaluated e in 12.3s (Avg@2=0.5000, Pass@1: 0.2500, "
        "Completion Length: 10.00 (±0.00, ∈[10.00, 10.00]), Truncated: 0.0%)"
    )


def test_a_resumed_run_repeats_no_evaluation_but_those_of_abandoned_steps(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for version in (0, 5, 10):
        log.write("eval", version, {"eval/e/avg@1": 0.5})
    log.write("trainer", 3, {"loss": 0.0})
    log.close()
    assert evaluated_versions(tmp_path / "metrics.jsonl", 5) == {0, 5}
    assert evaluated_versions(tmp_path / "none.jsonl", 5) == set()


def test_errored_rollouts_are_counted_and_not_scored():
    env = LetterEnvironment(size=4, fail=lambda task, attempt: task.id == "letters-2")
    player = make_runner(FakeEngine())
    named = NamedEnvironment(name="letters", environment=env)
    got = asyncio.run(evaluate(named, player, split="eval", num_examples=-1, rollouts_per_example=2))
    assert got.errored == 2
    assert "letters-2" not in got.by_task
    assert len(got.rewards) == 6


@pytest.mark.parametrize(("version", "told"), [(3, False), (4, True)])
def test_evaluation_records_and_warns_about_versions(tmp_path, caplog, version, told):
    player = make_runner(FakeEngine(version=version))
    named = NamedEnvironment(name="letters", environment=LetterEnvironment(size=2))
    evaluated = [(EvalEnvConfig(id="letters"), named)]
    asyncio.run(
        evaluate_all(
            evaluated,
            player,
            num_examples=2,
            rollouts_per_example=1,
            directory=tmp_path,
            measured={"step": 3},
        )
    )
    figures = json.loads((tmp_path / "letters.json").read_text())
    assert (figures["step"], figures["versions"]) == (3, [version])
    assert ("versions 4" in caplog.text) is told


def test_lone_surrogate_is_replaced_when_written(tmp_path):
    got = result({"a \ud800": [1.0]}, 1)
    asyncio.run(write_evaluation(tmp_path, got, {"model": "m \udfff"}))
    (line,) = map(json.loads, (tmp_path / "e.jsonl").read_text().splitlines())
    assert line["task_id"] == "a \ufffd"
    assert read_rows(tmp_path / "e.jsonl")["a \ufffd", 0].reward == 1.0
    assert json.loads((tmp_path / "e.json").read_text())["model"] == "m \ufffd"


def test_task_data_that_json_cannot_represent_becomes_text():
    board = {(0, 1): "x", 2: {"y"}, "z": [{(3,): None}]}
    got = replace(rollout(1.0), task=Task(id="a", messages=(), data={"board": board}))
    data = json.loads(got.evaluation_line(0))["data"]
    assert data == {"board": {"(0, 1)": "x", "2": "{'y'}", "z": [{"(3,)": None}]}}


@pytest.mark.parametrize(
    ("rewards", "truncated", "level"),
    [((1.0, 0.0), False, SUCCESS), ((1.0, 0.0), True, logging.WARNING), ((None, None), False, logging.ERROR)],
)
def test_evaluation_without_results_has_a_higher_log_level(rewards, truncated, level):
    played = [rollout(reward, truncated=truncated) for reward in rewards]
    assert EvalResult(env_name="e", all_rollouts=played, rollouts_per_example=2, seconds=1.0).level == level


class CleansUp(LetterEnvironment):
    """Environment that cleans up after a rollout: the first one for `seconds`, each other one longer."""

    def __init__(self, seconds):
        super().__init__(size=3)
        self.seconds, self.begun, self.cleaned = seconds, 0, []

    async def rollout(self, task, policy):
        number = self.begun = self.begun + 1
        try:
            await asyncio.sleep(HANG)
        finally:
            await asyncio.sleep(self.seconds + 0.02 * (number - 1))
            self.cleaned.append(number)


@pytest.mark.parametrize("is_group", [True, False])
@pytest.mark.parametrize(("seconds", "cleaned"), [(0.0, [1, 2, 3]), (HANG, [])])
def test_cancelled_rollouts_have_some_time_to_clean_up(is_group, seconds, cleaned, monkeypatch):
    if seconds:
        for module in (rollout_runner, evaluation):
            monkeypatch.setattr(module, "CLEANUP_SECONDS", 0.1)
    env = CleansUp(seconds)
    named, runner = NamedEnvironment(name="letters", environment=env), make_runner(FakeEngine())

    async def run():
        if is_group:
            running = runner.start_group(GroupTask(index=0, env=named, task=env.tasks("train")[0]), 3)
        else:
            evaluating = evaluate(named, runner, split="train", num_examples=3, rollouts_per_example=1)
            running = asyncio.create_task(evaluating)
        while env.begun < 3:
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running])
        return list(env.cleaned)

    assert asyncio.run(run()) == cleaned
