"""Runs whose engines get new weights by broadcast."""

import pytest

from .conftest import processes_of
from .test_supervision import ended_well, of_kind, trained

pytestmark = pytest.mark.e2e
BROADCAST = ("--trainer.weights.transport", "broadcast")
TWO = ("--inference-gpu-ids", "0,1")
ENGINE = ("broadcast.join", "broadcast.receive", "broadcast.received", "weights.swap", "weights.swapped")
TRAINER = ("broadcast.offer", "broadcast.send", "broadcast.sent")


def with_faults(runner, folder, kills):
    runner.env |= {"BUCKEYE_FAULTS": ",".join(kills), "BUCKEYE_FAULTS_DONE": str(folder)}


def broadcasts(runner):
    """Return the steps that began after a broadcast of weights."""
    metrics = runner.metrics("out", "trainer")
    return [step for step, values in metrics.items() if "weights/broadcast_seconds" in values]


def test_run_continues_if_an_engine_dies_in_a_broadcast(runner, start, tmp_path):
    """The restarted engine loads files, and takes part in later broadcasts."""
    with_faults(runner, tmp_path, ["broadcast.receive=kill@2"])
    ended_well(start(runner.rl("out", *BROADCAST, *TWO, steps=10, level=1)))
    assert [event["process"][:9] for event in of_kind(runner, "restart")] == ["inference"]
    assert trained(runner) == list(range(10))
    assert len(broadcasts(runner)) >= 4
    assert not processes_of(runner.root / "out")


@pytest.mark.slow
@pytest.mark.parametrize("level", [0, 1])
def test_broadcast_run_survives_kills_at_every_phase(runner, start, tmp_path, level):
    """A synchronous run has the weights, bit by bit, of a run that uses files and is not disturbed."""
    if level == 0:
        runner.ok(runner.rl("straight", *TWO, steps=16, level=0))
    with_faults(runner, tmp_path, [f"{point}=kill@{visit}" for point in ENGINE + TRAINER for visit in (2, 3)])
    ended_well(start(runner.rl("out", *BROADCAST, *TWO, "--ckpt.interval", 1, steps=16, level=level)))
    assert len(list(tmp_path.glob("*=kill@*"))) == 16
    assert sorted(set(trained(runner))) == list(range(16))
    assert broadcasts(runner)
    assert not processes_of(runner.root / "out")
    if level == 0:
        assert runner.curve("out") == runner.curve("straight")
        weights = [runner.root / name / "weights/step_16/model.safetensors" for name in ("out", "straight")]
        assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.slow
def test_broadcast_run_equals_a_run_by_files(finished, runner):
    runner.ok(runner.rl("out", *BROADCAST, steps=5, level=0))
    assert broadcasts(runner) == [1, 2, 3, 4]
    logs = [(one.root / "out/logs/trainer.stdout").read_text() for one in (runner, finished)]
    assert [log.count("Engines get new weights by") for log in logs] == [1, 1]
    assert runner.curve("out") == finished.curve("out")
    weights = [one.root / "out/weights/step_5/model.safetensors" for one in (runner, finished)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
