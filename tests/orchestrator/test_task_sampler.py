"""Which task comes when."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from buckeye.orchestrator.environments import NamedEnvironment
from buckeye.orchestrator.task_sampler import TaskSampler

from .fakes import LetterEnvironment


def sampler(*ratios, size=10, seed=0):
    return TaskSampler(
        [
            NamedEnvironment(name=f"env{i}", environment=LetterEnvironment(f"env{i}", size=size), ratio=r)
            for i, r in enumerate(ratios)
        ],
        seed=seed,
    )


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=4), st.integers(1, 60))
def test_environments_get_their_share_at_every_moment(ratios, count):
    s = sampler(*ratios)
    dealt = Counter(s[i].env.name for i in range(count))
    for i, ratio in enumerate(ratios):
        assert abs(dealt[f"env{i}"] - count * ratio / sum(ratios)) <= len(ratios)


def test_every_task_is_dealt_once_an_epoch_in_an_order_that_changes():
    s = sampler(1.0)
    first = [s[i].task.id for i in range(10)]
    second = [s[i].task.id for i in range(10, 20)]
    assert sorted(first) == sorted(second) == sorted(f"env0-{i}" for i in range(10))
    assert first != second


def test_a_group_index_means_the_same_task_in_any_order_of_asking():
    forwards, backwards = sampler(1.0, 3.0), sampler(1.0, 3.0)
    want = [forwards[i].task.id for i in range(30)]
    assert [backwards[i].task.id for i in reversed(range(30))] == want[::-1]
    assert [sampler(1.0, 3.0, seed=1)[i].task.id for i in range(30)] != want
