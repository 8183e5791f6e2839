"""Dealing by cell: where the groups go, that nothing is forgotten, and that a resumed run deals the same."""

import asyncio
import json
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buckeye.config.environments import EnvPauseConfig
from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.envs.base import Outcome, Task
from buckeye.errors import UsageError
from buckeye.inference.client import SamplingParams
from buckeye.orchestrator.collector import CollectorSettings, GroupCollector
from buckeye.orchestrator.curriculum import WINDOW, Curriculum, load_curricula
from buckeye.orchestrator.deterministic_sampling import DeterministicSampling
from buckeye.orchestrator.environments import NamedEnvironment
from buckeye.orchestrator.filters import group_filter
from buckeye.orchestrator.pauses import EnvironmentPauses
from buckeye.orchestrator.player import RolloutPlayer
from buckeye.orchestrator.task_sampler import TaskSampler
from tests.waiting import HANG

from .fakes import FakeEngine, LetterEnvironment, LetterRenderer


class Endless:
    """Tasks that are made when asked for; there are more than could ever be listed."""

    def __init__(self, cell, size=10**12):
        self.cell, self.size = cell, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        assert 0 <= index < self.size
        return Task(
            id=f"{self.cell}:{index}", messages=({"role": "user", "content": "a"},), data={"cell": self.cell}
        )


class CellEnvironment(LetterEnvironment):
    """`rates` are the chances of a reward of 1, by cell; what is drawn depends on task and reply only."""

    def __init__(self, rates, name="cells", size=10**12):
        super().__init__(name)
        self.rates, self.size = rates, size

    def curriculum(self):
        return {cell: Endless(cell, self.size) for cell in self.rates}

    async def rollout(self, task, policy):
        reply = await policy.chat(list(task.messages))
        rate = self.rates[task.data["cell"]]
        return Outcome(reward=float(random.Random(f"{task.id}/{reply.text}").random() < rate))


def cell_of(task):
    return task.id.partition(":")[0]


def play(curriculum, rates, groups, *, size=8, first=0, seed=0):
    """Deal and settle groups one after the other; returns how often each cell came."""
    dealt = Counter()
    for index in range(first, first + groups):
        cell = cell_of(curriculum.deal(index))
        rng = random.Random(f"{seed}/{index}")
        curriculum.settle(index, [float(rng.random() < rates[cell]) for _ in range(size)])
        dealt[cell] += 1
    return dealt


def curriculum(*cells, size=10**12, seed=0):
    return Curriculum("env", {cell: Endless(cell, size) for cell in cells}, seed=seed)


def settle_cells(c, rates, first=0, groups=200, size=10):
    """Settle groups with exactly the given solve rates, whatever is dealt."""
    for index in range(first, first + groups):
        solved = round(rates[cell_of(c.deal(index))] * size)
        c.settle(index, [1.0] * solved + [0.0] * (size - solved))


def test_most_groups_go_to_what_is_neither_easy_nor_hard():
    rates = {"easy": 1.0, "medium": 0.5, "hard": 0.0}
    dealt = play(curriculum(*rates), rates, 400)
    # weights 0.1, 1 and 0.1: shares 1/12, 10/12 and 1/12
    assert dealt["medium"] > 300
    assert dealt["easy"] > 10
    assert dealt["hard"] > 10


def test_weights_and_rates_of_the_metrics():
    rates = {"a/1": 1.0, "a/2": 0.5, "b/1": 0.0}
    c = curriculum(*rates)
    assert c.metrics() == pytest.approx(  # no rates yet; two families, one of two cells
        {
            "curriculum/env/a/1/weight": 1 / 4,
            "curriculum/env/a/2/weight": 1 / 4,
            "curriculum/env/b/1/weight": 1 / 2,
        }
    )
    settle_cells(c, rates)
    # family a weighs 1 and its cells share it 0.1 : 1; family b weighs 0.1
    assert c.metrics() == pytest.approx(
        {
            "curriculum/env/a/1/weight": 1 / 1.1 * 0.1 / 1.1,
            "curriculum/env/a/2/weight": 1 / 1.1 * 1 / 1.1,
            "curriculum/env/b/1/weight": 0.1 / 1.1,
            "curriculum/env/a/1/solve_rate": 1.0,
            "curriculum/env/a/2/solve_rate": 0.5,
            "curriculum/env/b/1/solve_rate": 0.0,
        }
    )


@pytest.mark.parametrize(
    ("rate", "full"), [(0.1, False), (0.2, True), (0.5, True), (0.8, True), (0.9, False)]
)
def test_the_band_is_from_a_fifth_to_four_fifths(rate, full):
    c = curriculum("x", "reference")
    settle_cells(c, {"x": rate, "reference": 0.5})
    assert c.shares()["x"] == pytest.approx(1 / 2 if full else 1 / 11)


def test_only_a_reward_of_at_least_one_is_solved():
    c = curriculum("x")
    c.deal(0)
    c.settle(0, [0.99, 1.0, 1.5, 0.0])
    assert c.metrics()["curriculum/env/x/solve_rate"] == 2 / 4


def test_a_family_of_many_cells_is_dealt_no_more_often():
    rates = {**{f"wide/{depth}": 0.5 for depth in range(1, 9)}, "narrow/1": 0.5}
    dealt = play(curriculum(*rates), rates, 600)
    assert 240 < dealt["narrow/1"] < 360
    assert min(dealt.values()) > 15


def test_cells_that_were_never_played_are_tried_before_those_out_of_reach():
    c = curriculum("hard", "new")
    for index in range(1000):  # until the first cell was played often and the other never
        if cell_of(c.deal(index)) == "hard":
            c.settle(index, [0.0] * 8)
    assert c.shares()["new"] == pytest.approx(1 / 1.1)


@pytest.mark.parametrize(("rollouts", "share"), [(4, 1 / 2), (6, 1 / 2), (7, 1 / 11)])
def test_a_group_of_few_unlucky_rollouts_takes_no_cell_out(rollouts, share):
    # four rollouts of which two were solved are added: 2 / (6 + 4) is the edge of the band
    c = curriculum("x", "y")
    index = next(i for i in range(100) if cell_of(c.deal(i)) == "x")
    c.settle(index, [0.0] * rollouts)
    assert c.shares()["x"] == pytest.approx(share)


def test_a_cell_comes_back_when_it_can_be_solved():
    c = curriculum("medium", "late")
    before = play(c, {"medium": 0.5, "late": 0.0}, 200)
    after = play(c, {"medium": 0.5, "late": 0.5}, 400, first=200)
    assert before["late"] < 40
    assert after["late"] > 120


def test_groups_older_than_the_window_are_forgotten():
    c = curriculum("x")
    for index in range(WINDOW + 3):
        c.deal(index)
        c.settle(index, [1.0 if index < 3 else 0.0])
    assert c.metrics()["curriculum/env/x/solve_rate"] == 0.0


def test_a_group_without_rewards_says_nothing_about_its_cell():
    c = curriculum("x", "y")
    before = c.metrics()
    c.deal(0)
    c.settle(0, [])
    assert c.metrics() == before


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 100])
def test_every_task_of_a_cell_comes_once_before_any_comes_again(size):
    c = curriculum("x", size=size)
    ids = [c.deal(index).id for index in range(2 * size)]
    every = sorted(f"x:{i}" for i in range(size))
    assert sorted(ids[:size]) == sorted(ids[size:]) == every
    if size >= 16:
        assert ids[:size] != ids[size:]
        assert [curriculum("x", size=size, seed=1).deal(i).id for i in range(size)] != ids[:size]


def test_an_endless_cell_is_drawn_from_all_over():
    c = curriculum("x")
    places = [int(c.deal(index).id.partition(":")[2]) / 10**12 for index in range(200)]
    assert len(set(places)) == 200
    assert all(30 < sum(low <= p < low + 0.25 for p in places) < 70 for low in (0.0, 0.25, 0.5, 0.75))


moves = st.lists(st.tuples(st.booleans(), st.integers(0, 4)), max_size=60)


@given(moves, moves, st.integers(0, 3))
def test_a_restored_curriculum_deals_the_same(before, after, seed):
    """Any history of groups dealt and settled; then the state through JSON, and two ways on."""
    cells = ("a/1", "a/2", "b/1", "c")

    def go_on(c, history, index, open_groups):
        trace = []
        for settles, solved in history:
            if settles and open_groups:
                c.settle(open_groups.pop(0), [1.0] * solved + [0.0] * (4 - solved))
            else:
                trace.append(c.deal(index).id)
                open_groups.append(index)
                index += 1
        return index, [*trace, *(c.deal(i).id for i in open_groups), c.metrics()]

    original, open_groups = curriculum(*cells, size=7, seed=seed), []
    index, _ = go_on(original, before, 0, open_groups)
    restored = curriculum(*cells, size=7, seed=seed)
    restored.restore(json.loads(json.dumps(original.state())), open_groups)
    assert restored.state() == original.state()
    assert go_on(restored, after, index, list(open_groups)) == go_on(
        original, after, index, list(open_groups)
    )


def test_a_group_keeps_its_task_while_others_change_the_statistics():
    c = curriculum("easy", "medium", "hard")
    first = [c.deal(index).id for index in range(20)]
    play(c, {"easy": 1.0, "medium": 0.5, "hard": 0.0}, 100, first=20)
    assert [c.deal(index).id for index in range(20)] == first


def test_a_state_of_other_cells_and_groups_is_used_as_far_as_it_goes():
    old = curriculum("kept", "gone")
    settle_cells(old, {"kept": 0.5, "gone": 0.5})
    tasks = {index: old.deal(index).id for index in range(200, 240)}
    new = curriculum("kept", "added")
    new.restore(old.state(), pending=range(200, 230))
    assert new.metrics()["curriculum/env/kept/solve_rate"] == 0.5
    for index in range(200, 230):
        dealt = new.deal(index)
        assert dealt.id == tasks[index] if tasks[index].startswith("kept") else cell_of(dealt) != "gone"
    assert len(new.state()["open"]) == 30


def named(*environments):
    return [NamedEnvironment(name=e.name, environment=e) for e in environments]


def test_without_any_cells_the_run_does_not_start():
    with pytest.raises(UsageError, match=r"orchestrator.curriculum is true.*: one, two have none"):
        load_curricula(named(LetterEnvironment("one"), CellEnvironment({}, "two")), 0, {})


def test_an_empty_cell_is_refused():
    with pytest.raises(UsageError, match=r"environment cells has no tasks in the cell 'a/1'"):
        load_curricula(named(CellEnvironment({"a/1": 0.5}, size=0)), 0, {})


def test_an_environment_without_cells_is_dealt_as_before():
    plain, cells = LetterEnvironment("plain"), CellEnvironment({"a": 0.5})
    environments = named(plain, cells)
    mixed = TaskSampler(environments, seed=1, curricula=load_curricula(environments, 1, {}))
    before = TaskSampler(named(plain, LetterEnvironment("cells")), seed=1)
    for index in range(40):
        dealt, expected = mixed[index], before[index]
        assert dealt.env.name == expected.env.name
        if dealt.env.name == "plain":
            assert dealt.task == expected.task
            mixed.settle(index, [1.0, 0.0])
        else:
            assert cell_of(dealt.task) == "a"
    assert {key.split("/")[1] for key in mixed.metrics()} == {"cells"}


RATES = {"letter/1": 0.9, "letter/2": 0.5, "letter/3": 0.0, "word": 0.2}
FRESH = {"next_group": 0, "pending": []}


def collector(
    engine,
    *,
    state=FRESH,
    deterministic=None,
    level=0,
    drop_zero_spread=True,
    oversampling=1.0,
    others=(),
    age=8,
):
    environments = named(CellEnvironment(RATES), *others)
    player = RolloutPlayer(
        sampler=deterministic or engine,
        renderer=LetterRenderer(),
        params=SamplingParams(max_tokens=8),
        seq_len=64,
        seed=7,
        timeout=HANG,
        retries=1,
    )
    options = CollectorSettings(
        batch_size=16,
        group_size=4,
        min_group_size=2,
        run_ahead=level,
        deterministic=deterministic is not None,
        most_token_age=age if level else 0,
        oversampling_factor=oversampling,
        max_empty_batches=50,
        max_steps=None,
        weights_timeout=HANG,
        filter_group=group_filter(OrchestratorConfig(zero_spread="drop" if drop_zero_spread else "keep")),
    )
    sampler = TaskSampler(environments, seed=3, curricula=load_curricula(environments, 3, state))
    pauses = EnvironmentPauses([env.name for env in environments], EnvPauseConfig())
    return GroupCollector(sampler, player, options, pauses, state=dict(state))


async def collect(c, engine, deterministic, steps):
    """Per step: index, task and rewards of every group, and the state after it as it is on disk."""
    made = []
    for step in steps:
        engine.version = step
        c.set_version(step)
        deterministic.begin(step)
        collected = await c.collect(step, lambda version: None)
        groups = [(g.index, g.rollouts[0].task.id, g.rewards) for g in collected.groups]
        made.append((groups, json.dumps(c.state())))
    await c.close()
    return made


@pytest.mark.parametrize("oversampling", [1.0, 1.5])
@pytest.mark.parametrize("stop", [1, 3, 7])
def test_a_resumed_synchronous_run_deals_the_same_tasks(stop, oversampling):
    def run(steps, state=FRESH):
        engine = FakeEngine()
        deterministic = DeterministicSampling(engine)
        drop = oversampling == 1  # else nothing is dropped, so that every batch leaves two groups over
        c = collector(
            engine,
            state=state,
            deterministic=deterministic,
            drop_zero_spread=drop,
            oversampling=oversampling,
            others=[LetterEnvironment()],
        )
        return asyncio.run(collect(c, engine, deterministic, steps))

    straight = run(range(8))
    state = json.loads(straight[stop - 1][1])
    assert run(range(stop, 8), state) == straight[stop:]
    if oversampling > 1:
        assert len(state["pending"]) == 2  # dealt before, and played after


def test_groups_dropped_for_want_of_spread_are_counted():
    """Without them the hopeless cell would have no rate at all, and full weight for ever."""
    engine = FakeEngine()
    deterministic = DeterministicSampling(engine)
    made = asyncio.run(
        collect(collector(engine, deterministic=deterministic), engine, deterministic, range(8))
    )
    saved = json.loads(made[-1][1])["curriculum"]["cells"]["cells"]["letter/3"]
    assert saved["dealt"] >= len(saved["recent"]) > 0
    assert all(solved == 0 for solved, _ in saved["recent"])


def test_a_stale_group_is_played_again_with_its_task_and_counted_once():
    async def run():
        engine = FakeEngine(version=0)
        c = collector(engine, level=1, drop_zero_spread=False, age=1)
        await c.collect(0, lambda version: None)  # four more groups of version 0 are now in flight
        await asyncio.sleep(0.01)
        before = c.state()
        engine.version = 2
        c.set_version(2)
        batch = await c.collect(2, lambda version: None)
        await c.close()
        return before, batch, c.state()

    before, batch, after = asyncio.run(run())
    assert batch.dropped == {"stale": 4}
    dealt = {index: cell for index, cell, _ in before["curriculum"]["cells"]["open"]}
    assert len(dealt) == 4
    assert {g.index: cell_of(g.rollouts[0].task) for g in batch.groups} == dealt
    counted_before, counted_after = (
        sum(len(cell["recent"]) for cell in state["curriculum"]["cells"]["cells"].values())
        for state in (before, after)
    )
    assert (counted_before, counted_after) == (4, 8)


def test_a_group_of_one_rollout_counts_too():
    c = curriculum("x")
    c.deal(0)
    c.settle(0, [1.0])
    assert c.metrics()["curriculum/env/x/solve_rate"] == 1.0
