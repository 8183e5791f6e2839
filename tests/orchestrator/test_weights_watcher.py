"""New weights reach the engines immediately; weights of other runs never do."""

import asyncio
from types import SimpleNamespace

import pytest

from buckeye.base.process import RunIdentity
from buckeye.errors import InferenceError, RunError
from buckeye.orchestrator.weights_watcher import WeightsWatcher
from buckeye.transport.weights import publish_weights
from tests.waiting import HANG

pytestmark = pytest.mark.anyio

ME = RunIdentity(run_id="mine", attempt=2)


def publish(root, step, identity=ME):
    def fill(directory):
        (directory / "model.safetensors").write_bytes(b"x")

    return publish_weights(root, step, fill, identity=identity, dtype="float32")


def watcher(root, updates, possible=lambda: 5, check=lambda: None, due=lambda: None):
    async def update_weights(path, version, checksum, **_):
        updates.append((version, path.name))

    client = SimpleNamespace(update_weights=update_weights, check=check)
    return WeightsWatcher(
        root,
        client,
        ME,
        first_version=3,
        newest_possible=possible,
        due=due,
        on_update=lambda version: None,
    )


async def run_until(w, version):
    running = asyncio.create_task(w.run())
    reaching = asyncio.create_task(w.wait_for_version(version, 5.0))
    await asyncio.wait([running, reaching], return_when=asyncio.FIRST_COMPLETED)
    done = running if running.done() else reaching
    running.cancel()
    reaching.cancel()
    await done


def test_the_newest_version_of_this_attempt_is_loaded(tmp_path):
    publish(tmp_path, 3)
    publish(tmp_path, 4, RunIdentity(run_id="mine", attempt=1))
    publish(tmp_path, 5, RunIdentity(run_id="other", attempt=2))
    updates = []
    asyncio.run(run_until(watcher(tmp_path, updates), 3))
    assert updates == [(3, "step_3")]


def test_weights_newer_than_the_run_are_refused(tmp_path, refusal):
    publish(tmp_path, 50)
    updates = []
    with refusal(RunError):
        asyncio.run(run_until(watcher(tmp_path, updates), 3))
    assert updates == []


def test_waiting_for_a_version_has_a_deadline(tmp_path, refusal):
    with refusal(RunError):
        asyncio.run(watcher(tmp_path, []).wait_for_version(3, 0.05))


def test_unrecoverable_engines_end_the_watcher(tmp_path, refusal):
    def check():
        raise InferenceError("all are out")

    with refusal(InferenceError):
        asyncio.run(run_until(watcher(tmp_path, [], check=check), 3))


async def measured(w, due, root, updates):
    """Watch while versions 3 to 7 exist; 4 and 6 are due for an evaluation, which takes a while."""
    running = asyncio.create_task(w.run())
    for version in (4, 6):
        await w.wait_for_version(version, HANG)
        await asyncio.sleep(0.1)  # newer versions exist all the time
        assert w.version == version
        due.pop(0)
    await w.wait_for_version(7, HANG)
    running.cancel()


def test_due_version_is_kept_until_it_is_evaluated(tmp_path):
    for version in range(3, 8):
        publish(tmp_path, version)
    updates, due = [], [4, 6]
    w = watcher(tmp_path, updates, possible=lambda: 9, due=lambda: due[0] if due else None)
    asyncio.run(measured(w, due, tmp_path, updates))
    assert updates == [(4, "step_4"), (6, "step_6"), (7, "step_7")]


async def test_unfinished_evaluation_comes_before_newer_weights(tmp_path):
    publish(tmp_path, 2, RunIdentity(run_id="mine", attempt=1))
    publish(tmp_path, 3)
    updates, due = [], [2]
    w = watcher(tmp_path, updates, due=lambda: due[0] if due else None)
    running = asyncio.create_task(w.run())
    await w.wait_for_version(2, HANG)
    assert w.version == 2
    due.pop()
    await w.wait_for_version(3, HANG)
    running.cancel()
    assert updates == [(2, "step_2"), (3, "step_3")]


async def test_evaluation_time_does_not_count_for_the_weights_deadline(tmp_path, refusal):
    publish(tmp_path, 3)
    due = [3]
    w = watcher(tmp_path, [], due=lambda: due[0] if due else None)
    running = asyncio.create_task(w.run())
    await w.wait_for_version(3, HANG)
    waiting = asyncio.create_task(w.wait_for_version(4, 0.1))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    due.pop()
    with refusal(RunError):
        await waiting
    running.cancel()
