"""The test rollout of `buckeye env install`: its stop reason and its text."""

import pytest

from buckeye.envs.base import Outcome, Task
from buckeye.workers.installed.smoke_rollout import Smoke
from buckeye.workers.worker_side.adapters.verifiers_v0 import _outcome


@pytest.mark.parametrize(
    ("turns", "fields", "stop"),
    [
        (1, {}, "done"),
        (3, {}, "max_turns_reached"),
        (1, {"is_truncated": True}, "truncated"),
        (1, {"stop_condition": "no_tools_called"}, "no_tools_called"),
    ],
)
def test_single_turn_of_verifiers_v0_that_was_answered_is_done(turns, fields, stop):
    state = {"reward": 1.0, "stop_condition": "max_turns_reached", "trajectory": [{}] * turns}
    assert _outcome(state | fields)["stop_reason"] == stop


def test_reward_is_rounded():
    task = Task(id="a", messages=({"role": "user", "content": "Say 1."},))
    outcome = Outcome(reward=0.020000000000000004, stop_reason="done", components={"length": 1.0})
    assert "reward      0.02 (done)\n" in Smoke(tasks=1, split="train", task=task, outcome=outcome).text()
