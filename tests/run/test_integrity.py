"""Damaged files of a run, and files of other runs: detected, reported, survived."""

from __future__ import annotations

import signal
import time

import psutil
import pytest

from buckeye.base.storage import step_directories
from tests.waiting import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def process_of(output, kind):
    config = str(output / "configs" / kind)
    everything = psutil.process_iter(["cmdline"])
    (found,) = [p for p in everything if any(config in word for word in p.info["cmdline"] or [])]
    return found


def flip_a_byte(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_damaged_batch_is_written_again(runner):
    running = runner.start(runner.rl("out", steps=8))
    out = runner.root / "out"
    wait_for(lambda: len(runner.metrics("out", "trainer")) >= 2, "the second step")
    trainer = process_of(out, "trainer")
    trainer.send_signal(signal.SIGSTOP)
    wait_for(lambda: step_directories(out / "batches"), "a batch")
    step, batch = max(step_directories(out / "batches").items())
    flip_a_byte(batch / "batch.safetensors")
    trainer.send_signal(signal.SIGCONT)
    printed, _ = running.communicate()
    assert running.returncode == 0, printed
    log = (out / "logs" / "run.log").read_text()
    assert str(batch / "batch.safetensors") in log
    assert (out / "skipped" / f"damaged_step_{step}" / "batch.safetensors").exists()
    assert sorted(runner.metrics("out", "trainer")) == list(range(8))
    assert max(m["batches/written_again"] for m in runner.metrics("out", "orchestrator").values()) == 1


def test_a_run_survives_damaged_weights(runner):
    words = ("--inference-gpu-ids", "0,1", "--trainer-gpu-ids", "2", "--trainer.ckpt.interval", 2)
    running = runner.start(runner.rl("out", *words, steps=12, level=2))
    out = runner.root / "out"
    orchestrator, version = _stop_before_new_weights(runner, out)
    flip_a_byte(out / "weights" / f"step_{version}" / "model.safetensors")
    orchestrator.send_signal(signal.SIGCONT)
    printed, _ = running.communicate()
    assert running.returncode == 0, printed
    assert "digest differs" in (out / "logs" / "run.log").read_text()
    assert sorted(runner.metrics("out", "trainer")) == list(range(12))
    steps = runner.metrics("out", "orchestrator")
    assert all(m["rollouts/errored"] == 0 for m in steps.values())


def _stop_before_new_weights(runner, out):
    """Stop the orchestrator before it sees the newest weights; return it and their version."""
    wait_for(lambda: len(runner.metrics("out", "trainer")) >= 3, "the third step")
    orchestrator = process_of(out, "orchestrator")
    while True:
        wait_for(lambda: step_directories(out / "batches"), "a batch")
        orchestrator.send_signal(signal.SIGSTOP)
        waiting = step_directories(out / "batches")
        published = step_directories(out / "weights")
        if waiting and max(waiting) + 1 not in published:
            break
        orchestrator.send_signal(signal.SIGCONT)
        time.sleep(0.05)
    version = max(waiting) + 1
    wait_for(lambda: version in step_directories(out / "weights"), f"version {version}")
    return orchestrator, version
