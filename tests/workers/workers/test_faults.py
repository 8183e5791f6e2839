"""A worker that dies, hangs, floods or grows is replaced: its rollout fails, the next one does not."""

import asyncio
import re

import pytest
from tests.waiting import wait_for
from tests.workers.workers.conftest import Says, is_gone, play, rogue

from buckeye.errors import UsageError

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def short_lived(opened):
    """Environment with short timeouts, so that workers are replaced soon."""
    return opened(cancel_timeout=0.5, rollout_timeout=1.0)


DEATHS = {
    "dies": ("worker", "died: the worker exited with code 7; last output:\na last word"),
    "crashes": ("worker", "killed: the worker was killed by signal 11"),
    "closes_connection": ("worker", "killed: the worker"),
    "writes_garbage": ("worker", "protocol: the worker sent an invalid message"),
    "blocks": ("timeout", "the rollout did not end within 1.5 s"),
    "ignores_cancel": ("timeout", "the rollout did not end within 1.5 s"),
}


SLOW = {"crashes", "closes_connection", "blocks", "ignores_cancel"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in DEATHS])
def test_failed_worker_is_replaced(short_lived, name):
    assert play(short_lived, "good")[0].reward == 1.0
    [before] = short_lived.workers()
    boundary, message = DEATHS[name]
    [outcome] = play(short_lived, name)
    assert outcome.reward is None
    assert outcome.boundary == boundary
    assert message in outcome.error
    assert outcome.stop_reason == ("timeout" if boundary == "timeout" else "error")
    wait_for(lambda: is_gone(before))
    assert play(short_lived, "good")[0].reward == 1.0
    assert short_lived.workers() != [before]


def test_concurrent_rollouts_of_a_dead_worker_are_errors(short_lived):
    outcomes = play(short_lived, "waits", "dies", "waits")
    assert [outcome.boundary for outcome in outcomes] == ["worker"] * 3
    assert all(outcome.reward is None for outcome in outcomes)
    assert [outcome.reward for outcome in play(short_lived, "good", "good")] == [1.0, 1.0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("floods", {"max_output_bytes": 20_000_000}, "flooded:"),
        (
            "hoards",
            {"max_memory_bytes": 200 << 20, "heartbeat_timeout": 4.0},
            "memory: the worker uses [2-9]\\d\\d MiB; .* 200 MiB",
        ),
        ("holds_interpreter", {"heartbeat_timeout": 2.0}, "silent:"),
    ],
)
def test_a_worker_beyond_its_limits_is_stopped(opened, tmp_path, name, settings, said):
    environment = opened(log_dir=tmp_path, log_name="rogue", **settings)
    [outcome] = play(environment, name)
    assert (outcome.reward, outcome.boundary) == (None, "worker")
    assert re.search(said, outcome.error)
    if name == "floods":  # the end of its output is kept
        assert 20_000_000 <= (tmp_path / "rogue.stdout").stat().st_size < 40_000_000


def test_children_of_a_worker_end_with_it(opened, tmp_path):
    environment = opened(log_dir=tmp_path, log_name="rogue")
    assert play(environment, "spawns")[0].reward == 1.0
    [child] = re.findall(r"child (\d+)", (tmp_path / "rogue.stdout").read_text())
    assert not is_gone(int(child))
    asyncio.run(environment.close())
    wait_for(lambda: is_gone(int(child)))


@pytest.mark.slow
def test_restart_is_delayed_after_consecutive_failures(opened, tmp_path):
    environment = opened({"load": "once", "marker": str(tmp_path / "marker")}, max_failures=2)
    assert play(environment, "dies")[0].boundary == "worker"
    outcomes = [play(environment, "good")[0] for _ in range(2)]
    assert [outcome.boundary for outcome in outcomes] == ["worker", "worker"]
    assert "2 workers in a row" in outcomes[1].error


@pytest.mark.slow
def test_rollouts_are_spread_over_several_workers(opened):
    environment = opened(processes=2, rollout_timeout=1.0, cancel_timeout=1.0)
    play(environment, "good")
    assert len(set(environment.workers())) == 2
    waiting, good = play(environment, "blocks", "good")  # one worker is blocked, the other is not
    assert waiting.boundary == "timeout"
    assert good.reward == 1.0


@pytest.mark.slow
async def test_an_environment_that_is_closed_while_a_worker_starts_leaves_none(opened, tmp_path):
    environment = opened({"load": "slow second", "marker": str(tmp_path / "marker")}, processes=2)
    playing = asyncio.create_task(environment.rollout(rogue("good"), None))
    while not (tmp_path / "marker-2").exists():
        await asyncio.sleep(0.02)
    await environment.close()
    outcome = await playing
    assert (outcome.reward, outcome.boundary) == (None, "worker")
    wait_for(lambda: is_gone(int((tmp_path / "marker-2").read_text())))


@pytest.mark.slow
def test_closed_environment_refuses_rollouts_and_has_no_processes(opened):
    environment = opened()
    [pid] = environment.workers()
    asyncio.run(environment.close())
    wait_for(lambda: is_gone(pid))
    assert play(environment, "good")[0].boundary == "worker"
    with pytest.raises(UsageError, match="closed") as caught:
        environment.tasks("eval")
    assert caught.value.code == "BK-ENV-WORKER"


def test_tasks_are_listed_though_a_cancelled_rollout_does_not_end(opened):
    environment = opened(cancel_timeout=0.2)
    assert play(environment, "good")[0].reward == 1.0
    before = environment.workers()

    async def leave():
        rollout = asyncio.create_task(environment.rollout(rogue("blocks"), Says()))
        await asyncio.sleep(0.1)  # the worker's event loop is blocked by now
        rollout.cancel()
        await asyncio.wait([rollout])

    asyncio.run(leave())
    assert len(environment.tasks("eval")) == 1
    assert environment.workers() != before


def test_rollout_cancelled_before_its_start_does_not_replace_the_worker(opened):
    environment = opened(cancel_timeout=1.0)
    assert play(environment, "good")[0].reward == 1.0

    async def leave():
        first = asyncio.create_task(environment.rollout(rogue("blocks_a_little"), Says()))
        await asyncio.sleep(0.1)  # the worker's event loop is blocked by now
        second = asyncio.create_task(environment.rollout(rogue("good"), Says()))
        await asyncio.sleep(0.1)
        second.cancel()
        await first
        await asyncio.sleep(1.5)  # longer than cancel_timeout

    before = environment.workers()
    asyncio.run(leave())
    assert environment.workers() == before
