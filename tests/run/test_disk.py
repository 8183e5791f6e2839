"""Disk estimates compared with hand-computed sizes of a model's shapes, and the checks on them."""

from __future__ import annotations

import json

import pytest

from buckeye.base import disk as disk_room
from buckeye.config.environments import EvalEnvConfig
from buckeye.config.orchestrator import EvalConfig, OrchestratorConfig, RolloutsConfig
from buckeye.config.rl import DiskConfig, RLConfig
from buckeye.config.trainer import (
    ExperimentalConfig,
    LoRAConfig,
    ModelConfig,
    MuonConfig,
    SGDConfig,
    TrainerCheckpointConfig,
    TrainerConfig,
)
from buckeye.launch.preflight.disk import check_disk, count_parameters, estimate_disk
from buckeye.run_files.logs import prune_logs
from tests.small_disk import fill, small_disk


def need_of(estimate, kind):
    return next(need for need in estimate.needs if need.kind == kind)


def _config(tmp_path, *, lora=None, optim=None, ckpt=None, clean=False, **orchestrator):
    model = ModelConfig(device="cpu", experimental=ExperimentalConfig(lora=lora))
    changes = {"optim": optim} if optim is not None else {}
    return RLConfig(
        trainer=TrainerConfig(model=model, ckpt=ckpt, max_async_level=1, **changes),
        orchestrator=OrchestratorConfig(max_async_level=1, **orchestrator),
        output_dir=tmp_path / "out",
        clean=clean,
    )


def _small_files(model):
    return sum(path.stat().st_size for path in model.iterdir() if path.suffix != ".safetensors")


def test_disk_estimate_of_weights_and_checkpoints_follows_model_size(tmp_path, tiny_model):
    ckpt = TrainerCheckpointConfig(interval=10, keep=3)
    estimate = estimate_disk(_config(tmp_path, max_steps=100, ckpt=ckpt), tiny_model)
    parameters, files = count_parameters(tiny_model), _small_files(tiny_model)
    assert need_of(estimate, "weights").size == 4 * (4 * parameters + files)
    assert need_of(estimate, "checkpoints").size == (3 + 1) * (12 * parameters + files)
    assert need_of(estimate_disk(_config(tmp_path), None), "weights").size is None
    assert estimate_disk(_config(tmp_path), None).total is None


@pytest.mark.parametrize(
    ("steps", "interval", "keep", "evaluated", "count"),
    [
        (100, 10, 3, False, 4),  # three, and one being written
        (100, 10, 3, True, 5),  # and the best
        (20, 10, 3, False, 2),  # the run makes only two
        (95, 10, None, False, 10),  # nine, and one at the end
        (100, None, 3, False, 1),  # only at the end
    ],
)
def test_disk_estimate_counts_checkpoints_at_maximum(
    tmp_path, tiny_model, steps, interval, keep, evaluated, count
):
    evaluation = EvalConfig(env=[EvalEnvConfig(id="x")]) if evaluated else None
    ckpt = TrainerCheckpointConfig(interval=interval, keep=keep)
    estimate = estimate_disk(_config(tmp_path, max_steps=steps, ckpt=ckpt, eval=evaluation), tiny_model)
    one = 12 * count_parameters(tiny_model) + _small_files(tiny_model)
    assert need_of(estimate, "checkpoints").size == count * one


def test_disk_estimate_of_adapter_follows_its_matrices(tmp_path, tiny_model):
    lora = LoRAConfig(rank=2, target_modules=["down_proj"], modules_to_save=["model.norm"])
    estimate = estimate_disk(_config(tmp_path, lora=lora), tiny_model)
    hidden, inner, layers = _shape(tiny_model)
    trained, files = layers * 2 * (hidden + inner) + hidden, _small_files(tiny_model)
    assert need_of(estimate, "weights").size == 4 * (4 * trained + files)
    assert need_of(estimate, "checkpoints").size == 12 * trained + files


def test_disk_estimate_includes_optimizer_state(tmp_path, tiny_model):
    parameters, files = count_parameters(tiny_model), _small_files(tiny_model)

    def size(optim):
        return need_of(estimate_disk(_config(tmp_path, optim=optim), tiny_model), "checkpoints").size - files

    assert size(SGDConfig(momentum=0.0)) == 4 * parameters
    assert size(SGDConfig()) == 8 * parameters
    assert 8 * parameters < size(MuonConfig()) < 12 * parameters


def test_disk_estimate_of_rollouts_is_bounded_by_seq_len_and_keep(tmp_path):
    settings = {"batch_size": 10, "rollouts_per_example": 5, "seq_len": 100, "max_steps": 50}
    each = 100 * 12 + 400
    assert need_of(estimate_disk(_config(tmp_path, **settings), None), "rollouts").size == 50 * 10 * each
    kept = _config(tmp_path, **settings, rollouts=RolloutsConfig(keep=4))
    assert need_of(estimate_disk(kept, None), "rollouts").size == 5 * 10 * each  # four, and one being written


@pytest.fixture
def disk(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_room, "_MAX_RESERVE", 1000)
    with small_disk(tmp_path / "out", size=4_000_000) as path:
        yield path


def test_check_disk_fails_with_sizes_if_run_does_not_fit(tmp_path, tiny_model, disk):
    fill(disk, leave=1_500_000)
    ckpt = TrainerCheckpointConfig(interval=1, keep=2)
    config = _config(tmp_path, ckpt=ckpt, max_steps=20)
    estimate = estimate_disk(config, tiny_model)
    refused = check_disk(config, estimate)
    assert (refused.state, "--disk.check false" in refused.do) == ("failed", True)
    sure = sum(need_of(estimate, kind).size for kind in ("weights", "checkpoints"))
    free = 1_500_000 // 4096 * 4096
    first, *parts = refused.seen.splitlines()
    assert f"{(sure + 1000 - free) / 1e6:.1f} MB" in first
    assert [part.partition(":")[0].strip() for part in parts] == [
        *("checkpoints", "weights", "reserve", "free"),
    ]
    assert "ckpt.keep" in parts[0]
    unchecked = config.model_copy(update={"disk": DiskConfig(check=False)})
    assert check_disk(unchecked, estimate).line.startswith("disk: ")


def test_check_disk_subtracts_existing_files(tmp_path, tiny_model, disk):
    ckpt = TrainerCheckpointConfig(interval=1, keep=2)
    quiet = {"batch_size": 1, "rollouts_per_example": 1, "seq_len": 1, "max_steps": 20}
    config = _config(tmp_path, ckpt=ckpt, **quiet)
    estimate = estimate_disk(config, tiny_model)
    assert check_disk(config, estimate).state == "ok"
    (disk / "checkpoints" / "step_1").mkdir(parents=True)
    checkpoints = disk / "checkpoints" / "step_1" / "x"
    checkpoints.write_bytes(b"x" * need_of(estimate, "checkpoints").size)
    fill(disk, leave=need_of(estimate, "weights").size + 150_000)  # and small files
    assert check_disk(config, estimate).state == "ok"
    afresh = config.model_copy(update={"clean": True})
    assert check_disk(afresh, estimate).state == "ok"
    checkpoints.write_bytes(b"")
    (disk / "ballast2").write_bytes(b"x" * need_of(estimate, "checkpoints").size)
    assert check_disk(afresh, estimate).state == "failed"


def _shape(model):
    config = json.loads((model / "config.json").read_text())
    return config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]


def test_prune_logs_keeps_logs_in_use(tmp_path):
    logs = tmp_path / "logs"
    for attempt in (1, 2, 9, 10, 11):
        (logs / f"attempt_{attempt}").mkdir(parents=True)
    (logs / "trainer.stdout").symlink_to("attempt_11/trainer.stdout")
    (logs / "inference.stdout").symlink_to("attempt_1/inference.stdout")  # a server outlives attempts
    (logs / "attempt_9 (copy)").mkdir()  # of the user
    prune_logs(tmp_path, None)
    assert len(list(logs.glob("attempt_*"))) == 6
    prune_logs(tmp_path, 1)
    left = {path.name for path in logs.glob("attempt_*")}
    assert left == {"attempt_1", "attempt_10", "attempt_11", "attempt_9 (copy)"}
