"""Batches that vanish untrained are written again; servers are not blamed for damaged files."""

import asyncio
import errno
from functools import partial

import numpy as np
import pytest

from buckeye.base import disk
from buckeye.base.process import RunIdentity
from buckeye.base.storage import step_directory
from buckeye.errors import TransportError
from buckeye.orchestrator import weights_watcher
from buckeye.orchestrator.batch import BatchSender
from buckeye.orchestrator.weights_watcher import BrokenServers
from buckeye.transport.batches import Batch, Sample, read_batch, remove_batch
from buckeye.transport.restart_requests import RestartRequest, request_restart, take_restart_requests

from .test_weights_watcher import publish

ME = RunIdentity(run_id="mine", attempt=2)


def batch(step):
    arrays = {"loss_mask": np.array([False, True]), "versions": np.zeros(2, np.int32)}
    arrays |= {name: np.zeros(2, np.float32) for name in ("logprobs", "advantages")}
    sample = Sample(token_ids=np.array([3, 4], np.int32), temperature=1.0, **arrays)
    return Batch(step=step, samples=(sample,), orchestrator_state={"step": step})


def test_missing_untrained_batch_is_rewritten(tmp_path):
    sender = BatchSender(tmp_path, ME)
    asyncio.run(sender.write(batch(0)))
    asyncio.run(sender.write(batch(1)))
    publish(tmp_path / "weights", 1)  # batch 0 is trained
    publish(
        tmp_path / "weights", 2, RunIdentity(run_id="mine", attempt=1)
    )  # published by an earlier attempt: ignored
    remove_batch(tmp_path / "batches", 0)
    remove_batch(tmp_path / "batches", 1)
    asyncio.run(sender.rewrite_missing())
    assert sender.rewritten_batches == 1
    assert not step_directory(tmp_path / "batches", 0).exists()
    found = read_batch(tmp_path / "batches", 1, identity=ME)
    assert found is not None
    assert found.samples[0].token_ids.tolist() == [3, 4]
    assert found.orchestrator_state == {"step": 1}


def test_present_or_trained_batch_is_not_rewritten(tmp_path):
    sender = BatchSender(tmp_path, ME)
    asyncio.run(sender.write(batch(0)))
    asyncio.run(sender.rewrite_missing())
    publish(tmp_path / "weights", 1)
    remove_batch(tmp_path / "batches", 0)
    asyncio.run(sender.rewrite_missing())
    asyncio.run(sender.rewrite_missing())
    assert sender.rewritten_batches == 0
    assert list((tmp_path / "batches").iterdir()) == []


def has_request(run):
    return any((run / "restart").glob("*.json"))  # the folder exists before its file


async def report(servers, until):
    running = asyncio.create_task(servers.run())
    servers.report("http://127.0.0.1:4000", "wrong")
    async with asyncio.timeout(10):
        while not running.done() and not until():
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    if not running.cancelled():
        running.result()


def test_broken_server_with_valid_weights_gets_a_restart_request(tmp_path):
    publish(tmp_path / "weights", 1)
    asyncio.run(report(BrokenServers(tmp_path, ME), partial(has_request, tmp_path)))
    assert take_restart_requests(tmp_path) == [RestartRequest(url="http://127.0.0.1:4000", reason="wrong")]


def test_restart_request_waits_for_a_full_disk(tmp_path, monkeypatch):
    failures = [OSError(errno.ENOSPC, "no space"), OSError(errno.ENOSPC, "no space")]

    def request(*args):
        if failures:
            raise failures.pop()
        request_restart(*args)

    monkeypatch.setattr(weights_watcher, "request_restart", request)
    monkeypatch.setattr(disk, "_POLL_SECONDS", 0.01)
    asyncio.run(report(BrokenServers(tmp_path, ME), partial(has_request, tmp_path)))
    assert [one.reason for one in take_restart_requests(tmp_path)] == ["wrong"]


def test_damaged_weights_end_the_run_instead_of_a_restart(tmp_path):
    (publish(tmp_path / "weights", 1) / "model.safetensors").write_bytes(b"y")
    with pytest.raises(TransportError, match="digest"):
        asyncio.run(report(BrokenServers(tmp_path, ME), lambda: False))
    assert take_restart_requests(tmp_path) == []
