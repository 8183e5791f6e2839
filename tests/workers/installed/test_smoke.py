"""The test rollout of `buckeye env install`: its stop reason and its text."""

import asyncio
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from buckeye.envs.base import Outcome, Task
from buckeye.errors import BuckeyeError
from buckeye.workers.installed.record import InstalledEnvironment
from buckeye.workers.installed.smoke_rollout import Smoke, smoke_rollout
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


def test_failed_rollout_names_the_flag_of_arguments():
    installed = InstalledEnvironment(
        name="missing", id="missing", version="1", generation="verifiers-v0", module="missing",
        source="missing", extras=[], index=None, python=Path(sys.executable), python_version="3",
        constraints=[], requirements=[], installed_at=datetime.now(UTC),
    )  # fmt: skip
    with pytest.raises(BuckeyeError) as failed:
        asyncio.run(smoke_rollout(installed, ()))
    assert "missing --arg NAME=VALUE" in failed.value.hint
