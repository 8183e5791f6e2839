"""Order of the tasks."""

import pytest

from buckeye.envs.base import Task
from buckeye.errors import UsageError
from buckeye.orchestrator.environments import NamedEnvironment, load_split
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


def test_task_of_a_group_index_is_independent_of_access_order():
    forwards, backwards = sampler(1.0, 3.0), sampler(1.0, 3.0)
    want = [forwards[i].task.id for i in range(30)]
    assert [backwards[i].task.id for i in reversed(range(30))] == want[::-1]
    assert [sampler(1.0, 3.0, seed=1)[i].task.id for i in range(30)] != want


def test_every_task_is_assigned_once_per_epoch_in_a_new_order():
    s = sampler(1.0)
    first, second = ([s[i].task.id for i in range(start, start + 10)] for start in (0, 10))
    assert sorted(first) == sorted(second) == sorted(f"env0-{i}" for i in range(10))
    assert first != second


@pytest.mark.parametrize(
    ("tasks", "is_refused"),
    [(["one a", "two a"], False), (["one a", "two a", "one b"], True), (["one a", "two a", "one a"], False)],
)
def test_different_tasks_with_one_id_are_refused(tasks, is_refused):
    environment = LetterEnvironment("letters", size=len(tasks))
    environment.tasks = lambda split: [
        Task(id=name, messages=({"role": "user", "content": text},)) for name, text in map(str.split, tasks)
    ]
    env = NamedEnvironment(name="letters", environment=environment, ratio=1.0)
    if not is_refused:
        assert len(load_split(env, "train")) == len(tasks)
        return
    with pytest.raises(UsageError, match="'one'") as caught:
        load_split(env, "train")
    assert caught.value.code == "BK-ENV-TASKS"
