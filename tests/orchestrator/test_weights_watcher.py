"""New weights reach the engines at once; somebody else's never do."""

import asyncio
from types import SimpleNamespace

import pytest

from buckeye.errors import InferenceError, RunError
from buckeye.orchestrator.weights_watcher import WeightsWatcher
from buckeye.process import RunIdentity
from buckeye.transport.weights import publish_weights

ME = RunIdentity(run_id="mine", attempt=2)


def publish(root, step, identity=ME):
    publish_weights(
        root, step, lambda d: (d / "model.safetensors").write_bytes(b"x"), identity=identity, dtype="float32"
    )


def watcher(root, updates, possible=lambda: 5, check=lambda: None):
    async def update_weights(path, version, checksum, canary, adapter):
        updates.append((version, path.name))

    client = SimpleNamespace(update_weights=update_weights, check=check)
    return WeightsWatcher(
        root, client, ME, first_version=3, newest_possible=possible, on_update=lambda version: None
    )


async def run_until(w, version):
    running = asyncio.create_task(w.run())
    reaching = asyncio.create_task(w.reach(version, 5.0))
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


def test_weights_that_this_run_cannot_have_trained_are_refused(tmp_path):
    publish(tmp_path, 50)
    updates = []
    with pytest.raises(RunError, match="left from an earlier run"):
        asyncio.run(run_until(watcher(tmp_path, updates), 3))
    assert updates == []


def test_waiting_for_a_version_has_a_deadline(tmp_path):
    with pytest.raises(RunError, match="is the trainer running"):
        asyncio.run(watcher(tmp_path, []).reach(3, 0.05))


def test_engines_beyond_recovery_end_the_watch(tmp_path):
    def check():
        raise InferenceError("all are out")

    with pytest.raises(InferenceError, match="all are out"):
        asyncio.run(run_until(watcher(tmp_path, [], check=check), 3))
