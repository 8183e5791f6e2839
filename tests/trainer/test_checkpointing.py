"""Checkpoints of the trainer: written during training, killed in the middle, the best one kept."""

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from buckeye.base.faults import FAULTS, FAULTS_DONE
from buckeye.errors import CheckpointError
from buckeye.monitor.metrics import read_metrics
from buckeye.trainer.output import writer as output_module
from buckeye.trainer.output.background_thread import BackgroundThread
from buckeye.trainer.output.state import _gather_random_states, _restore_random_states
from buckeye.trainer.parallel.ranks import Ranks
from buckeye.trainer.rl import run_trainer
from buckeye.transport.checkpoint import (
    list_checkpoints,
    resolve_checkpoint,
    trainer_state_directory,
    verify_checkpoint,
)
from tests.trainer.rl_runs import ME, put, records, warnings
from tests.trainer.trainer_config import trainer_config

SCRIPT = Path(__file__).parent / "trainer_config.py"
POINTS = (
    "checkpoint.captured",
    "checkpoint.files",
    "checkpoint.before_commit",
    "checkpoint.committed",
    "weights.publish",
    "weights.published",
)


def steps(run: Path) -> list[int]:
    return [info.step for info in list_checkpoints(run / "checkpoints")]


def find_leftovers(run: Path) -> list[Path]:
    return [path for name in ("checkpoints", "weights") for path in (run / name).glob(".*")]


@pytest.mark.e2e
@pytest.mark.parametrize(
    "point",
    [p if p == "checkpoint.before_commit" else pytest.param(p, marks=pytest.mark.slow) for p in POINTS],
)
def test_killed_writer_leaves_the_old_or_the_new_checkpoint(tmp_path, train, tiny_model, batches, point):
    straight, broken, marks = tmp_path / "straight", tmp_path / "broken", tmp_path / "marks"
    marks.mkdir()
    train(straight, batches)
    put(broken, batches)
    config = trainer_config(tiny_model, broken, max_steps=4, ckpt={"interval": 2})
    (tmp_path / "config.json").write_text(config.model_dump_json())
    fault = f"{point}=kill@{4 if point.startswith('weights') else 2}"  # while step 3 or 4 is written
    environment = {**os.environ, FAULTS: fault, FAULTS_DONE: str(marks), "BUCKEYE_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), str(tmp_path / "config.json")]
    killed = subprocess.run(command, env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    if point.startswith("weights"):  # another thread writes the checkpoint
        assert steps(broken) in ([], [2])
    else:
        assert steps(broken) == ([2, 4] if point == "checkpoint.committed" else [2])
    for info in list_checkpoints(broken / "checkpoints"):
        verify_checkpoint(info)
    begun = max(steps(broken), default=0)
    ckpt = {"interval": 1, "resume_step": -1 if begun else None}
    train(broken, batches[begun:], attempt=2, max_steps=4, ckpt=ckpt)
    final = load_file(broken / "weights" / "step_4" / "model.safetensors")
    expected = load_file(straight / "weights" / "step_4" / "model.safetensors")
    assert all(torch.equal(final[name], tensor) for name, tensor in expected.items())
    assert find_leftovers(broken) == []


def test_training_continues_while_a_checkpoint_is_written(tmp_path, train, batches, monkeypatch):
    """The writer of step 1 waits until step 2 is trained, and still writes the state after step 1."""
    trained = threading.Event()
    real = output_module.write_state

    def write_state(learner, directory, captured):
        if captured.progress.step == 1:
            assert trained.wait(60)
        real(learner, directory, captured)

    def observed(self, process, step, values):
        if process == "trainer" and step == 1:
            trained.set()
        return write(self, process, step, values)

    write = output_module.MetricsLog.write
    monkeypatch.setattr(output_module, "write_state", write_state)
    monkeypatch.setattr(output_module.MetricsLog, "write", observed)
    train(tmp_path, batches[:3], ckpt={"interval": 1})
    assert steps(tmp_path) == [1, 2, 3]
    for step in (1, 2, 3):
        state = trainer_state_directory(resolve_checkpoint(tmp_path / "checkpoints", step))
        kept = load_file(state / "model" / "model.safetensors")
        published = load_file(tmp_path / "weights" / f"step_{step}" / "model.safetensors")
        assert all(torch.equal(kept[name], tensor) for name, tensor in published.items())
        assert json.loads((state / "progress.json").read_text())["step"] == step
        moments = load_file(state / "optimizer.safetensors")
        assert {float(v) for name, v in moments.items() if name.endswith(".step")} == {float(step)}
    written = [r for r in read_metrics(tmp_path / "metrics.jsonl") if r["process"] == "checkpoint"]
    assert [r["step"] for r in written] == [1, 2, 3]
    assert all(r["bytes"] > 100_000 and r["seconds_written"] > 0 for r in written)
    assert written[1]["seconds_blocked"] >= 0


def test_checkpoint_write_error_ends_the_trainer(tmp_path, tiny_model, batches, monkeypatch, refusal):
    def write_state(learner, directory, captured):
        raise CheckpointError("the disk is made of cheese")

    monkeypatch.setattr(output_module, "write_state", write_state)
    put(tmp_path, batches)
    with refusal(CheckpointError):
        run_trainer(trainer_config(tiny_model, tmp_path, max_steps=4, ckpt={"interval": 1}))
    assert len(records(tmp_path)) < 4  # records are also written before the end
    assert steps(tmp_path) == []
    assert find_leftovers(tmp_path) == []


def test_background_thread_is_awaited_and_raises_its_error_once():
    def fail() -> None:
        raise ValueError("no")

    done: list[int] = []
    background = BackgroundThread()
    background.start("one", lambda: done.append(1))
    background.start("two", fail)
    assert done == [1]
    with pytest.raises(ValueError, match="no"):
        background.wait()
    background.check()
    background.wait()


def _evaluate(run: Path, step: int, reward: float) -> None:
    folder = run / "evals" / f"step_{step}"
    folder.mkdir(parents=True)
    (folder / "words.json").write_text(json.dumps({"mean_reward": reward, "n": 4, "attempt": 1}))
    (folder / "words.jsonl").write_text("{}\n")


def test_the_best_checkpoint_by_evaluation_is_kept(tmp_path, tiny_model, batches):
    for step, reward in ((1, 0.9), (2, 0.1), (3, 0.2)):
        _evaluate(tmp_path, step, reward)
    put(tmp_path, batches)
    config = trainer_config(tiny_model, tmp_path, max_steps=4, max_async_level=0)
    run_trainer(config.model_copy(update={"ckpt": config.ckpt.model_copy(update={"interval": 1, "keep": 1})}))
    assert steps(tmp_path) == [1, 4]


def test_no_checkpoint_is_deleted_if_the_best_is_unknown(tmp_path, train, batches, wording):
    _evaluate(tmp_path, 1, 0.5)
    (tmp_path / "evals" / "step_1" / "words.json").write_text("{")
    train(tmp_path, batches[:2], ckpt={"interval": 1, "keep": 1})
    assert steps(tmp_path) == [1, 2]
    assert warnings(tmp_path) == wording


def test_resume_skips_a_damaged_newest_checkpoint(tmp_path, train, tiny_model, batches, monkeypatch, wording):
    train(tmp_path, batches[:2], ckpt={"interval": 1})
    weights = tmp_path / "checkpoints" / "step_2" / "trainer" / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    monkeypatch.setenv("BUCKEYE_ATTEMPT", "2")
    put(tmp_path, batches[1:2], identity=replace(ME, attempt=2))
    with pytest.raises(CheckpointError, match=r"step_2.*SHA-256"):
        run_trainer(trainer_config(tiny_model, tmp_path, max_steps=2, ckpt={"resume_step": 2}))
    run_trainer(trainer_config(tiny_model, tmp_path, max_steps=2, ckpt={"resume_step": -1}))
    assert [message.partition(":")[0] for message in warnings(tmp_path)] == wording
    assert "checkpoint step `1`" in (tmp_path / "logs" / "run.log").read_text()
    verify_checkpoint(resolve_checkpoint(tmp_path / "checkpoints", 2))  # written again


def test_random_generators_are_restored():
    device = torch.device("cpu")
    stored = _gather_random_states(Ranks(0, 1, device), device)
    expected = torch.rand(3)
    _restore_random_states(stored, Ranks(1, 2, device), device)
    assert torch.equal(torch.rand(3), expected)
