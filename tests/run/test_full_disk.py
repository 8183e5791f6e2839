"""A real run whose disk fills up: it ends with a clear error, resumes, and loses nothing."""

from __future__ import annotations

import json
import time

import pytest

from buckeye.base.storage import step_directories
from buckeye.transport.checkpoint import list_checkpoints, verify_checkpoint
from buckeye.transport.weights import verify_weights
from tests.small_disk import fill, small_disk

_STEPS = 14
_SECONDS = 240.0


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk", size=20_000_000) as path:
        yield path


def _until(condition, process, what):
    deadline = time.monotonic() + _SECONDS
    while not condition():
        assert process.poll() is None, f"ended before {what}:\n{process.communicate()[0]}"
        assert time.monotonic() < deadline, f"no {what}"
        time.sleep(0.1)


def _steps(run):
    """Return the trained steps in the order of their complete records."""
    path = run / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    records = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return [r["step"] for r in records if r["process"] == "trainer"]


@pytest.mark.e2e
@pytest.mark.slow
def test_run_on_full_disk_fails_and_resumes(runner, disk):
    run = disk / "run"
    words = ("--ckpt.interval", 2, "--ckpt.keep", 2)
    process = runner.start(runner.rl(run, *words, steps=_STEPS))
    try:
        _until(lambda: len(_steps(run)) >= 4, process, "fourth step")
        ballast = fill(disk)  # to the last byte, during a write
        printed, _ = process.communicate(timeout=_SECONDS)
    finally:
        process.kill()
    assert process.returncode == 1, printed
    assert f"rl resume {run}" in printed
    ballast.unlink()
    before = _steps(run)
    runner.ok(runner.rl(run, *words, "--resume", steps=_STEPS), limit=_SECONDS)
    again = _steps(run)[len(before) :]
    assert again == list(range(again[0], _STEPS))
    assert 0 < again[0] <= len(before)
    _check_everything(run)


def _check_everything(run):
    for path in (run / "metrics.jsonl", run / "events.jsonl", *(run / "rollouts").glob("*.jsonl")):
        assert path.read_text().endswith("\n")
        assert all(json.loads(line) for line in path.read_text().splitlines())
    checkpoints = list_checkpoints(run / "checkpoints")
    assert [info.step for info in checkpoints] == [_STEPS - 2, _STEPS]
    for info in checkpoints:
        verify_checkpoint(info)
    versions = step_directories(run / "weights")
    assert max(versions) == _STEPS
    for directory in versions.values():
        verify_weights(directory)
    assert [path for path in run.rglob(".*") if ".tmp-" in path.name] == []


def test_run_that_does_not_fit_on_disk_is_refused_before_start(runner, disk):
    fill(disk, leave=2_000_000)
    run = disk / "run"
    words = ("--ckpt.interval", 1, "--ckpt.keep", 3)
    refused = runner.here(runner.rl(run, *words, steps=100))
    assert refused.returncode == 2, refused.stderr
    assert "checkpoints: 3.6 MB (3 kept" in refused.stderr
    assert "--disk.check false" in refused.stderr
    assert not (run / "run.json").exists()
    shown = runner.here(runner.rl(run, *words, "--dry-run", steps=100))
    assert shown.returncode == 2
    assert "--disk.check false" in shown.stderr
    assert "lower with" in shown.stdout
