"""Spread within groups: counted from rollouts, and played with a model."""

import json

import pytest

from buckeye.envs.base import Outcome, Task
from buckeye.orchestrator.evaluation import EvalResult
from buckeye.orchestrator.rollout import Rollout
from buckeye_audit.group_spread import check_spread, spread_of

TASK = Task(id="1", messages=())


def rollout(reward, *, truncated=False):
    outcome = Outcome(reward=reward, error=None if reward is not None else "lost")
    return Rollout(
        env_name="toy",
        task=TASK,
        outcome=outcome,
        segments=(),
        truncated=truncated,
        turns=1,
        seconds=0.0,
    )


def result(*groups):
    played = [rollout(reward, truncated=reward == 0.25) for group in groups for reward in group]
    return EvalResult(env_name="toy", played=played, rollouts_per_example=len(groups[0]), seconds=1.0)


def test_groups_are_counted_by_whether_their_rewards_differ():
    spread = spread_of(result((0, 1, 1), (1, 1, 1), (0, None, 0.25), (None, None, 1)))
    assert (spread.groups, spread.scored, spread.spread, spread.errored) == (4, 3, 2, 3)
    assert spread.truncated == pytest.approx(1 / 9)
    checked = check_spread(spread, "m")
    assert checked.status == "pass"
    assert (
        checked.detail == "m: rewards differ in 2 of 3 groups of 3 (67%), 11% truncated, 3 rollouts errored"
    )


def test_no_spread_anywhere_is_a_warning():
    assert check_spread(spread_of(result((0, 0), (1, 1))), "m").status == "warning"


def test_rollouts_that_all_errored_are_an_error():
    checked = check_spread(spread_of(result((None, None))), "m")
    assert (checked.status, checked.detail) == ("error", "m: no group has two scored rollouts; 2 errored")


@pytest.mark.slow
def test_a_model_plays_groups(runner):
    """The environment of these tests ignores the split and pays for a letter, so other checks fail."""
    argv = runner.argv("env", "check", "letters.py", "--model", runner.model, "--groups", 3)
    done = runner.run([*argv, "--max-tokens", "6", "--sample", "10", "--json"])
    assert done.returncode == 1, done.stderr
    last = json.loads(done.stdout)["checks"][-1]
    assert last["name"] == "spread within groups"
    assert " of 3 groups of 8 (" in last["detail"]
