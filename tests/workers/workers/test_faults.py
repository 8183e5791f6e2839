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
    "dies": ("worker", "died", "ended with exit code 7; its last lines:\na last word"),
    "crashes": ("worker", "killed", "was ended by signal 11"),
    "closes_connection": ("worker", "killed", "the worker"),
    "writes_garbage": ("worker", "protocol", "sent something that is no message"),
    "blocks": ("timeout", "stuck", "the outcome has not come within 1.5 s"),
    "ignores_cancel": ("timeout", "stuck", "the outcome has not come within 1.5 s"),
}


SLOW = {"crashes", "closes_connection", "blocks", "ignores_cancel"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in DEATHS])
def test_a_worker_that_cannot_go_on_is_replaced(short_lived, name):
    assert play(short_lived, "good")[0].reward == 1.0
    counted = short_lived.count_ended_workers()
    [before] = short_lived.workers()
    boundary, kind, message = DEATHS[name]
    [outcome] = play(short_lived, name)
    assert outcome.reward is None
    assert outcome.boundary == boundary
    assert message in outcome.error
    assert outcome.stop_reason == ("timeout" if boundary == "timeout" else "error")
    wait_for(lambda: is_gone(before))
    assert play(short_lived, "good")[0].reward == 1.0
    assert short_lived.workers() != [before]
    assert short_lived.count_ended_workers() == {**counted, kind: counted.get(kind, 0) + 1}


def test_rollouts_beside_one_that_kills_the_worker_are_errors_too_and_can_be_played_again(short_lived):
    outcomes = play(short_lived, "waits", "dies", "waits")
    assert [outcome.boundary for outcome in outcomes] == ["worker"] * 3
    assert all(outcome.reward is None for outcome in outcomes)
    assert [outcome.reward for outcome in play(short_lived, "good", "good")] == [1.0, 1.0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "settings", "said"),
    [
        ("floods", "flooded", {"max_output_bytes": 20_000_000}, ""),
        (
            "hoards",
            "memory",
            {"max_memory_bytes": 200 << 20, "heartbeat_timeout": 4.0},
            "memory: the worker has grown to [2-9]\\d\\d MiB; .* 200 MiB",
        ),
        ("holds_interpreter", "silent", {"heartbeat_timeout": 2.0}, "silent:"),
    ],
)
def test_a_worker_beyond_its_limits_is_stopped(opened, tmp_path, name, kind, settings, said):
    environment = opened(log_dir=tmp_path, log_name="rogue", **settings)
    [outcome] = play(environment, name)
    assert (outcome.reward, outcome.boundary) == (None, "worker")
    assert re.search(said, outcome.error)
    assert environment.count_ended_workers() == {kind: 1}
    if name == "floods":  # the end of its output is kept
        assert 20_000_000 <= (tmp_path / "rogue.stdout").stat().st_size < 40_000_000


def test_what_a_worker_started_ends_with_it(opened, tmp_path):
    environment = opened(log_dir=tmp_path, log_name="rogue")
    assert play(environment, "spawns")[0].reward == 1.0
    [child] = re.findall(r"child (\d+)", (tmp_path / "rogue.stdout").read_text())
    assert not is_gone(int(child))
    asyncio.run(environment.close())
    wait_for(lambda: is_gone(int(child)))


@pytest.mark.slow
def test_workers_that_never_finish_a_rollout_are_not_started_again_and_again(opened, tmp_path):
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
def test_a_closed_environment_plays_nothing_and_has_no_processes(opened):
    environment = opened()
    [pid] = environment.workers()
    asyncio.run(environment.close())
    wait_for(lambda: is_gone(pid))
    assert play(environment, "good")[0].boundary == "worker"
    with pytest.raises(UsageError, match="closed"):
        environment.tasks("eval")


def test_a_rollout_that_is_cancelled_before_it_began_costs_no_worker(opened):
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
    assert (environment.workers(), environment.count_ended_workers()) == (before, {})
