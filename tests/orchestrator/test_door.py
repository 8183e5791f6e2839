"""Outcomes of an environment are checked before use.

Any outcome gives a rollout with a reward or a counted error, and the step continues.
"""

import asyncio
import dataclasses
import gc
import json
import math
import re
import warnings
from decimal import Decimal
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from buckeye.base.user_function import load_user_function
from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.envs.base import Outcome, Task, required_tasks
from buckeye.envs.registry import find_local_loader
from buckeye.envs.single_turn import SingleTurnEnvironment
from buckeye.envs.stdlib_only.outcomes import location_of
from buckeye.errors import UsageError
from buckeye.orchestrator.batch import advantages_of, batch_metrics, make_batch, write_rollouts
from buckeye.orchestrator.environments import NamedEnvironment
from buckeye.orchestrator.group_scoring import score_pending_outcomes
from buckeye.orchestrator.rollout import Group
from buckeye.orchestrator.rollout_runner import run_rollout
from buckeye.orchestrator.task_sampler import GroupTask
from buckeye.workers.worker_side.adapters import buckeye_environment
from buckeye.workers.worker_side.adapters.buckeye_environment import BuckeyeEnvironment

from .fakes import FakeEngine, LetterRenderer, make_runner


class Given:
    """Environment that returns the outcomes in a task's data, one per rollout."""

    name = "given"

    def __init__(self):
        self.played = 0

    def tasks(self, split):
        return []

    async def rollout(self, task, policy):
        await policy.chat(task.messages)
        self.played += 1
        return task.data["outcomes"][self.played - 1]


class GivenInGroup(Given):
    async def rollout_in_group(self, task, policy):
        await policy.chat(task.messages)
        self.played += 1
        return Outcome(reward=None, pending=str(self.played))

    async def finish_group(self, task, outcomes):
        return task.data["outcomes"]


def play(*outcomes, environment=Given):
    player = make_runner(FakeEngine())
    task = Task(id="t-1", messages=({"role": "user", "content": "a"},), data={"outcomes": outcomes})
    env = NamedEnvironment(name="given", environment=environment())

    async def played():
        return await player.start_group(GroupTask(index=0, env=env, task=task), len(outcomes))

    return asyncio.run(played())


@pytest.mark.parametrize(
    "reward",
    [1, True, np.float32(1), np.float64(1), np.int64(1), np.bool_(True), np.array(1.0), torch.tensor(1.0)],
)
@pytest.mark.parametrize("environment", [Given, GivenInGroup])
def test_every_kind_of_number_is_a_reward(reward, environment):
    outcome = Outcome(reward=reward, components={"right": reward}, turn_rewards=(reward,))
    [rollout] = play(outcome, environment=environment).rollouts
    assert rollout.outcome == Outcome(reward=1.0, components={"right": 1.0}, turn_rewards=[1.0])
    assert [type(value) for value in (rollout.reward, rollout.outcome.components["right"])] == [float] * 2


WRONG = {
    "the reward is nan, which is not finite": Outcome(reward=math.nan),
    "component 'style' is 'good', not a number": Outcome(reward=1.0, components={"style": "good"}),
    "component 'style' is None, not a number": Outcome(reward=1.0, components={"style": None}),
    "a component's name is 5": Outcome(reward=1.0, components={5: 1.0}),
    "components is 'style', not a dictionary": Outcome(reward=1.0, components="style"),
    "stop_reason is 3, not text": Outcome(reward=1.0, stop_reason=3),
    "returned a float, not an Outcome": 0.5,
    "returned a NoneType, not an Outcome": None,
}


@pytest.mark.parametrize("message", WRONG)
@pytest.mark.parametrize("environment", [Given, GivenInGroup])
def test_invalid_outcome_error_names_environment_task_and_field(message, environment):
    group = play(WRONG[message], Outcome(reward=1.0), environment=environment)
    wrong, right = group.rollouts
    assert (wrong.reward, wrong.outcome.boundary, right.reward) == (None, "score", 1.0)
    assert message in wrong.outcome.error
    [shown] = group.errors
    assert shown.startswith("given, task t-1: ")
    assert message in shown


def test_pending_outcome_of_an_environment_without_groups_is_an_error():
    wrong, right = play(Outcome(reward=None, pending="a"), Outcome(reward=1.0)).rollouts
    assert (wrong.reward, wrong.outcome.boundary, right.reward) == (None, "score", 1.0)
    assert "finish_group()" in wrong.outcome.error


async def judge():
    return 1.0


NO_NUMBERS = {
    "None": lambda: None,
    "a text": lambda: "1.0",
    "a list": lambda: [1.0],
    "a tensor": lambda: torch.ones(2),
    "a Decimal": lambda: Decimal(1),
    "a coroutine": judge,
    "a future": lambda: asyncio.get_running_loop().create_future(),
    "an object": object,
}


class Author:
    """Environment in the style of third-party authors; `make` returns the reward."""

    name = "author"

    def __init__(self, make):
        self._make = make

    def tasks(self, split):
        return []

    async def rollout(self, task, policy):
        await policy.chat(task.messages)
        return Outcome(reward=self._make())

    async def _left(self, task, policy):
        await policy.chat(task.messages)
        return Outcome(reward=None, pending="a")

    async def _finished(self, task, outcomes):
        return list(map(self._scored, outcomes))

    def _scored(self, outcome):
        return Outcome(reward=self._make())


class InGroup(Author):
    rollout_in_group, finish_group = Author._left, Author._finished


class Asks(SingleTurnEnvironment):
    def __init__(self):
        super().__init__("asks", {})

    def grade(self, task, reply):
        return None


class AsksLater(Asks):
    async def grade(self, task, reply):
        return Outcome(reward=1.0)


class IsNotAsync(Author):
    def rollout(self, task, policy):
        return Outcome(reward=1.0) if self._make is None else policy.chat(task.messages)


class ForgetsToAwait(Author):
    async def rollout(self, task, policy):
        return Outcome(reward=float(policy.chat(task.messages).text))


def errors_of(environment, warned="error"):
    """Return the errors of two rollouts; fail if a coroutine was never awaited."""
    with warnings.catch_warnings():
        warnings.simplefilter(warned)
        group = play(None, None, environment=lambda: environment)
        gc.collect()
    return [(rollout.outcome.boundary, rollout.outcome.error) for rollout in group.rollouts]


@pytest.mark.parametrize("kind", NO_NUMBERS)
@pytest.mark.parametrize("environment", [Author, InGroup])
def test_invalid_reward_error_has_the_authors_line(kind, environment, wording):
    first, second = errors_of(environment(NO_NUMBERS[kind]))
    assert first == second
    boundary, error = first
    assert boundary == "score"
    assert "(test_door.py:" in error
    assert re.sub(r"test_door.py:\d+", "test_door.py:N", error) == wording


@pytest.mark.parametrize(
    "environment", [Asks(), AsksLater(), Author(None), IsNotAsync(1), ForgetsToAwait(None)]
)
def test_author_mistake_is_reported_with_its_line(environment, wording):
    first, second = errors_of(environment, "ignore" if isinstance(environment, ForgetsToAwait) else "error")
    assert first == second
    assert re.sub(r"test_door.py:\d+", "test_door.py:N", first[1]) == wording


@pytest.mark.parametrize("environment", [Asks(), AsksLater(), Author(judge), Author(lambda: "1.0")])
def test_worker_reports_author_mistakes(environment, monkeypatch):
    async def chat(*_, **__):
        return SimpleNamespace(
            message={}, text="a", truncated=False, no_room=False, prompt_tokens=0, completion_tokens=1
        )

    monkeypatch.setattr(buckeye_environment, "chat", chat)
    adapter = BuckeyeEnvironment(environment)
    task = {"id": "t-1", "messages": [], "data": {}}
    outcome = asyncio.run(adapter.rollout(task, {}, {"deadline": 10.0}))
    error = outcome["error"]
    assert (outcome["reward"], error["boundary"]) == (None, "score")
    told = error["message"] + location_of(error["trace"])
    assert told == errors_of(environment)[0][1]


def test_rollout_may_be_a_plain_function():
    assert [error for _, error in errors_of(IsNotAsync(None))] == [None, None]


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=3)
    | st.complex_numbers()
    | st.decimals()
    | st.floats(width=32).map(np.float32)
    | st.floats(width=32).map(torch.tensor)
    | st.builds(object),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def outcomes(draw):
    """Draw an Outcome of random field values, or only its reward value if the class refuses them."""
    fields = draw(
        st.fixed_dictionaries(
            {"reward": VALUES},
            optional={one.name: VALUES for one in dataclasses.fields(Outcome) if one.name != "reward"},
        )
    )
    try:
        return Outcome(**fields)
    except Exception:
        return fields["reward"]


@given(st.lists(outcomes(), min_size=1, max_size=3), st.sampled_from([Given, GivenInGroup]))
def test_step_continues_after_any_outcome(tmp_path, given_outcomes, environment):
    good = Outcome(reward=1.0, components={"right": 1.0})
    group = play(good, *given_outcomes, environment=environment)
    assert len(group.scored) + len(group.errors) == 1 + len(given_outcomes)
    assert all(type(reward) is float and math.isfinite(reward) for reward in group.rewards)
    config = OrchestratorConfig(batch_size=4, rollouts_per_example=4)
    path = tmp_path / "rollouts.jsonl"
    asyncio.run(write_rollouts(path, [(None, group)], LetterRenderer().decode))
    assert len(path.read_text().splitlines()) == len(group.rollouts)
    metrics = batch_metrics(0, [group], config)
    assert all(type(json.loads(json.dumps(value))) in (int, float) for value in metrics.values())
    scored = [Group(index=0, rollouts=tuple(group.scored))]
    make_batch(0, scored, advantages_of(scored, config), config, state={})


def test_huge_rewards_become_errors(wording):
    group = play(Outcome(reward=1e308), Outcome(reward=1e308), Outcome(reward=-1e308), Outcome(reward=1e30))
    assert group.rewards == [1e30]
    assert group.errors[0] == wording
    config = OrchestratorConfig(batch_size=4, rollouts_per_example=4)
    scored = [Group(index=0, rollouts=tuple(group.scored) * 4)]
    batch_metrics(0, scored, config)
    make_batch(0, scored, advantages_of(scored, config), config, state={})


class Careless(Given):
    async def rollout(self, task, policy):
        await policy.chat(task.messages)
        return await self.grade(task)

    async def grade(self, task):
        return json.loads(task.data["answer"])


def test_error_has_the_location_in_the_environment(caplog, tmp_path):
    group = play(None, None, environment=Careless)
    outcome = group.rollouts[0].outcome
    assert outcome.error.startswith("KeyError: 'answer' (test_door.py:")
    assert outcome.error.endswith(" in grade)")
    assert [frame.rpartition("/")[2].partition(":")[0] for frame in outcome.trace] == ["test_door.py"] * 2
    assert outcome.trace[-1].endswith('in grade: return json.loads(task.data["answer"])')
    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.splitlines() == [
        f"given, task t-1: {outcome.error}",
        *(f"  {frame}" for frame in outcome.trace),
    ]
    path = tmp_path / "rollouts.jsonl"
    asyncio.run(write_rollouts(path, [("errored", group)], LetterRenderer().decode))
    written = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["trace"] for line in written] == [list(outcome.trace)] * 2


def _exits(*_):
    """Do as model-written code does that ends with exit()."""
    raise SystemExit(3)


class _Exits(Given):
    async def rollout(self, task, policy):
        return _exits()


class _ExitsInGroup(GivenInGroup):
    async def finish_group(self, task, outcomes):
        return await asyncio.to_thread(_exits)


@pytest.mark.parametrize("environment", [_Exits, _ExitsInGroup])
def test_an_environment_that_exits_ends_its_rollout_only(environment):
    async def outcome():
        env, task = environment(), Task(id="t", messages=(), data={})
        if environment is _Exits:
            return await run_rollout(lambda: env.rollout(task, None), 60.0)
        pending = [Outcome(reward=None, pending="1")]
        return (await score_pending_outcomes(env, task, pending, [1], timeout=60.0))[0]

    found = asyncio.run(outcome())
    assert found.reward is None
    assert "SystemExit: 3 (test_door.py:" in found.error


def test_module_that_exits_on_import_is_reported(tmp_path, monkeypatch):
    (tmp_path / "exits.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(UsageError, match="SystemExit: 3"):
        load_user_function(f"{tmp_path / 'exits.py'}:f", {}, setting="loss")
    with pytest.raises(UsageError, match="SystemExit: 3"):
        find_local_loader(str(tmp_path / "exits.py"))
    with pytest.raises(UsageError, match="SystemExit: 3"):
        required_tasks(SimpleNamespace(name="exits", tasks=_exits), "train")
