"""A real run on a disk that gets full: it pauses, says so, goes on when there is room, and loses nothing."""

from __future__ import annotations

import json
import time

import pytest

from buckeye.base.disk import waits_for_disk
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
    """The trained steps in the order of their records; every line is whole."""
    path = run / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    records = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return [r["step"] for r in records if r["process"] == "trainer"]


@pytest.mark.slow
def test_a_run_pauses_on_a_full_disk_and_goes_on(runner, disk):
    run = disk / "run"
    words = ("--ckpt.interval", 2, "--ckpt.keep", 2, "--disk.reserve", 200_000)
    process = runner.start(runner.rl(run, *words, steps=_STEPS))
    try:
        _until(lambda: len(_steps(run)) >= 3, process, "third step")
        ballast = fill(disk)  # to the last byte, in the middle of whatever is being written
        _until(lambda: waits_for_disk(run), process, "pause")
        before = len(_steps(run))
        time.sleep(3)
        paused = len(_steps(run))
        assert paused <= before + 2  # the step that was being trained, and a batch that was there already
        time.sleep(2)
        assert len(_steps(run)) == paused
        assert "the run waits for more" in runner.run(runner.argv("rl", "status", run)).stdout
        ballast.unlink()
        _until(lambda: len(_steps(run)) >= before + 2, process, "step after the pause")

        ballast = fill(disk, leave=300_000, into="run/logs/attempt_0/trainer.stdout")  # weights do not fit
        _until(lambda: waits_for_disk(run), process, "second pause")
        time.sleep(3)
        cleaned = runner.run(runner.argv("rl", "clean", run, "--yes"))
        assert cleaned.returncode == 0, cleaned.stderr
        assert not ballast.exists()
        printed, _ = process.communicate(timeout=_SECONDS)
    finally:
        process.kill()
    assert process.returncode == 0, printed
    assert "The run waits for disk space" in printed
    assert "see what can go: rl clean" in printed
    _check_everything(run)


@pytest.mark.slow
def test_a_run_that_waits_for_space_can_be_stopped_and_resumed(runner, disk):
    run = disk / "run"
    words = ("--ckpt.interval", 2, "--ckpt.keep", 2)
    process = runner.start(runner.rl(run, *words, steps=_STEPS))
    try:
        _until(lambda: len(_steps(run)) >= 4, process, "fourth step")
        ballast = fill(disk)
        _until(lambda: waits_for_disk(run), process, "pause")
        stopped = runner.run(runner.argv("rl", "stop", run))
        assert stopped.returncode == 0, stopped.stderr
        printed, _ = process.communicate(timeout=_SECONDS)
    finally:
        process.kill()
    assert process.returncode == 130, printed
    ballast.unlink()
    before = _steps(run)
    resumed = runner.run(runner.rl(run, *words, "--resume", steps=_STEPS), limit=_SECONDS)
    assert resumed.returncode == 0, resumed.stderr
    again = _steps(run)[len(before) :]
    assert again == list(range(again[0], _STEPS))
    assert 0 < again[0] <= len(before)


def _check_everything(run):
    assert _steps(run) == list(range(_STEPS))
    for path in (run / "metrics.jsonl", run / "events.jsonl", *(run / "rollouts").iterdir()):
        assert path.read_text().endswith("\n")
        assert all(json.loads(line) for line in path.read_text().splitlines())
    events = [json.loads(line)["event"] for line in (run / "events.jsonl").read_text().splitlines()]
    # the launcher looks now and then: a short time between two waits it may not see
    assert events.count("disk_full") == events.count("disk_freed") >= 1
    assert events[-1] == "finish"
    assert "restart" not in events
    checkpoints = list_checkpoints(run / "checkpoints")
    assert [info.step for info in checkpoints] == [_STEPS - 2, _STEPS]
    for info in checkpoints:
        verify_checkpoint(info)
    versions = step_directories(run / "weights")
    assert max(versions) == _STEPS
    for directory in versions.values():
        verify_weights(directory)
    temporary = [path for path in run.rglob(".*") if ".tmp-" in path.name]
    assert temporary == []
    for name in ("trainer", "orchestrator"):
        lines = (run / "logs" / f"{name}.stdout").read_text().splitlines()
        assert any("There is disk space again" in line for line in lines) or name == "orchestrator"
        assert "finished!" in lines[-1] or "finished." in lines[-1]


def test_a_run_that_cannot_fit_is_refused_before_anything_starts(runner, disk):
    fill(disk, leave=2_000_000)
    run = disk / "run"
    words = ("--ckpt.interval", 1, "--ckpt.keep", 3)
    refused = runner.here(runner.rl(run, *words, steps=100))
    assert refused.returncode == 2, refused.stderr
    assert "checkpoints: 3.6 MB (3 kept, and one being written: 8" in refused.stderr
    assert "--disk.check false" in refused.stderr
    assert not (run / "run.json").exists()
    shown = runner.here(runner.rl(run, *words, "--dry-run", steps=100))
    assert shown.returncode == 0
    assert "To start all the same: --disk.check false" in shown.stderr
    assert "less with" in shown.stdout
