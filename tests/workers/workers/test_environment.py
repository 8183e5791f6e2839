"""Each misbehavior of an environment in a rollout is an error of that rollout, with its boundary.

The worker and this process continue.
"""

import asyncio
import json
import os
import re

import pytest
from tests.workers.workers.conftest import Says, play, rogue

from buckeye.envs.settings import WorkerSettings
from buckeye.errors import InferenceError, UsageError
from buckeye.workers.errors import WorkerError
from buckeye.workers.loading import load_environment
from buckeye.workers.pool import WorkerPool
from buckeye.workers.worker_side.main import _print_traceback


def test_tasks_are_those_of_the_environment_also_if_they_are_many(environment):
    tasks = environment.tasks("train")
    assert [task.id for task in tasks] == ["good", "raises", "asks"]
    assert tasks[0].messages == ({"role": "user", "content": "do good"},)
    assert tasks[0].data == {"name": "good"}
    assert [task.id for task in environment.tasks("many")] == [str(number) for number in range(3000)]
    assert environment.tasks("train") is tasks


def test_missing_split_and_broken_split_raise_different_errors(environment):
    with pytest.raises(KeyError, match="'test'"):
        environment.tasks("test")
    for split, reason in (("raises", "no tasks today"), ("wrong", "a string `id`")):
        with pytest.raises(UsageError, match=reason) as caught:
            environment.tasks(split)
        assert caught.value.code == "BK-ENV-TASKS"


ERRORS = {
    "raises": ("step", "RuntimeError: this is not how it is done"),
    "reset": ("reset", "StepError: the episode cannot begin"),
    "huge": ("step", r"RuntimeError: x{4000}\.\.\. \(50000000 characters in all\)"),
    "surrogate": ("step", r"RuntimeError: half a letter: \?"),
    "key": ("step", r"RuntimeError: refused with \(redacted\)"),
    "exits": ("step", "SystemExit: 5"),
    "nan": ("score", "the reward is nan, which is not finite"),
    "infinite": ("score", "which is not finite"),
    "text reward": ("score", "the reward is '1', not a number"),
    "huge reward": ("score", r"the reward is '1+\.\.\. \(str\), not a number"),
    "no reward": ("score", "the outcome has neither a reward nor an error"),
    "nan component": ("score", "component 'length' is nan"),
    "text component": ("score", "component 'length' is 'long', not a number"),
    "huge component": ("score", "a component's name is 'x+"),
    "huge stop reason": ("score", "stop_reason is 'x+"),
    "unknown key": ("score", "unknown key 'rewards'"),
    "number": ("score", "the outcome is 5, not a dictionary"),
    "nowhere": ("score", "without a boundary"),
    "agent": ("agent", "Exit: it ended with 3"),
    "both": ("score", "E: not graded"),
    "object": ("score", "component 'x' is <object"),
    "wrong turns": ("score", r"turn_rewards add up to 0\.5, but the reward is 1"),
    "late": ("score", "the outcome has neither a reward nor an error"),
}


def test_failed_rollout_has_a_boundary_and_no_reward(environment):
    before = environment.workers()
    for name, outcome in zip(ERRORS, play(environment, *ERRORS), strict=True):
        boundary, message = ERRORS[name]
        assert outcome.reward is None, name
        assert outcome.boundary == boundary, name
        assert outcome.stop_reason == "error", name
        assert re.search(message, outcome.error), f"{name}: {outcome.error}"
    assert environment.workers() == before


def test_error_has_the_location_where_it_was_raised(environment):
    [outcome] = play(environment, "raises")
    assert outcome.error.endswith(" in _raises)")
    assert "/rogue.py:" in outcome.trace[-1]


def test_process_state_of_an_environment_is_isolated(environment):
    before = environment.workers()
    harmless = ["exits_elsewhere", "forks", "ignores_signals", "leaves_thread", "good"]
    for name in harmless:
        [outcome] = play(environment, name)
        assert outcome.reward == 1.0, f"{name}: {outcome.error}"
    assert (outcome.components, outcome.stop_reason) == ({"one": 1.0}, "answered")
    assert (outcome.error, outcome.boundary) == (None, None)
    assert environment.workers() == before


def test_worker_sees_only_the_named_variables(opened, monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_API_KEY", "sesame-sesame")
    monkeypatch.setenv("JUDGE_KEY", "open")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    monkeypatch.setenv("no_proxy", "judge.here")
    monkeypatch.setenv("BUCKEYE_HOME", str(tmp_path))
    (tmp_path / ".env").write_text("SEARCH_KEY=from a file\n")
    environment = opened(variables=("JUDGE_KEY", "SEARCH_KEY", "NOT_SET"))
    [outcome] = play(environment, "environ")
    seen, _ = json.JSONDecoder().raw_decode(outcome.error.removeprefix("step: RuntimeError: "))
    assert (seen["JUDGE_KEY"], seen["SEARCH_KEY"]) == ("open", "from a file")
    assert seen["PATH"] == os.environ["PATH"]
    assert not {"WANDB_API_KEY", "PYTHONPATH", "NOT_SET"} & set(seen)
    assert {"127.0.0.1", "judge.here"} <= set(seen["NO_PROXY"].split(","))


def test_cancelled_rollout_ends_in_the_worker_which_survives(environment):
    async def cancel_one():
        playing = asyncio.create_task(environment.rollout(rogue("waits"), None))
        await asyncio.sleep(0.2)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing

    before = environment.workers()
    asyncio.run(cancel_one())
    assert play(environment, "good")[0].reward == 1.0
    assert environment.workers() == before


LOADING = {
    "raises": r"RuntimeError: no data\nlast output:\nI was going to load",
    "exits": "SystemExit: 3",
    "dies": "died: the worker exited with code 7; last output:\na last word",
    "garbage": "protocol: the worker sent an invalid message",
    "nameless": "the adapter's description has no name",
    "hangs": "loading the environment did not end within 0.5 s",
}
SLOW = {"exits", "garbage", "nameless"}


@pytest.mark.parametrize("how", [pytest.param(h, marks=[pytest.mark.slow] * (h in SLOW)) for h in LOADING])
def test_load_failure_is_a_usage_error_with_the_reason(opened, how):
    with pytest.raises(UsageError, match=LOADING[how]) as caught:
        opened({"load": how}, load_timeout=0.5 if how == "hangs" else 60.0)
    assert "worker_side/main.py" not in str(caught.value)


@pytest.mark.parametrize(
    ("args", "traceback"),
    [
        ({"sise": 4}, []),
        ({"size": "x"}, ["own_env.py", "ValueError"]),
        ({"size": None}, ["own_env.py", "TypeError"]),
    ],
)
def test_only_frames_of_the_environment_are_printed(args, traceback, tmp_path, capfd):
    (tmp_path / "own_env.py").write_text("def load_environment(size=3):\n    return int(size)\n")
    with pytest.raises(UsageError) as caught:
        load_environment(str(tmp_path / "own_env.py"), **args)
    _print_traceback(caught.value)
    printed = capfd.readouterr().err
    assert [word for word in ("own_env.py", "ValueError", "TypeError") if word in printed] == traceback
    assert "buckeye/" not in printed


def test_worker_killed_during_load_or_tasks_is_replaced(opened, tmp_path):
    environment = opened({"load": "killed", "marker": str(tmp_path / "marker")})
    assert (tmp_path / "marker").exists()
    before = environment.workers()
    assert len(environment.tasks("killed")) == 1
    assert environment.workers() != before


def test_an_interpreter_that_cannot_be_run_is_named(tmp_path, refusal):
    from buckeye.workers.environment import open_worker_environment

    missing = tmp_path / "bin" / "python"
    with refusal(UsageError):
        open_worker_environment("rogue", {}, missing, WorkerSettings())


def test_pool_reports_any_number_of_failed_starts(tmp_path, monkeypatch):
    """2.0 ** 1024 is too large for a float."""
    monkeypatch.setattr("buckeye.workers.pool._MIN_PAUSE", 0.0)
    pool = WorkerPool("rogue", {}, tmp_path / "python", WorkerSettings())

    async def start():
        for _ in range(1026):
            with pytest.raises(WorkerError):
                await pool.info()

    asyncio.run(start())


def test_reply_of_the_model_reaches_the_environment_over_http(environment):
    policy = Says("0.75")
    [outcome] = play(environment, "asks", policy=policy)
    assert outcome.reward == 0.75
    assert policy.asked == [[{"role": "user", "content": "do asks"}]]


def test_model_failure_is_a_model_error_even_if_the_environment_handles_it(
    environment,
    wording,
):
    [outcome] = play(environment, "asks", policy=Says(error=InferenceError("no engine is left")))
    assert (outcome.reward, outcome.boundary) == (None, "model")
    assert outcome.error == wording


def test_rollout_beyond_a_limit_has_the_limit_as_stop_reason(opened):
    environment = opened(max_turns=3)
    policy = Says()
    [outcome] = play(environment, "asks_always", policy=policy)
    assert outcome.stop_reason == "max_turns"
    assert outcome.reward is None  # this environment gives up when the model does not answer
    assert len(policy.asked) == 3
    assert play(environment, "asks")[0].stop_reason == "answered"
