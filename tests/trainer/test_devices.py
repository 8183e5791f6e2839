"""Training on other devices gives the same results as on a CPU, and leaves no tensors there."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from buckeye.trainer.rl import run_trainer
from buckeye.trainer.sft import run_sft
from tests.devices import DEVICES
from tests.trainer.rl_runs import put, records
from tests.trainer.trainer_config import sft_config, trainer_config


@pytest.fixture(autouse=True)
def _parameters_move_in_place():
    """Move parameters in place, as to a real device; otherwise tied parameters would separate."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.fixture
def take(monkeypatch):
    """Return `take(device)`, which sets the device of all later trainers."""
    monkeypatch.setenv("BUCKEYE_THREADS", "1")
    return lambda device: monkeypatch.setattr(
        "buckeye.trainer.setup.pick_device", lambda *_: torch.zeros(0, device=device).device
    )


def weights(directory: Path) -> torch.Tensor:
    """Return all weights as one vector."""
    tensors = load_file(next(directory.glob("*.safetensors")))
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def assert_close(found: Path, expected: Path, *, before: Path) -> None:
    """Assert that two models have moved almost equally since `before`.

    The check is on the norm over all weights: where a gradient is nearly 0, rounding decides its sign and so
    Adam's step. The limit is relative to the movement, so that a model that did not move is not close.
    """
    moved = (weights(expected) - weights(before)).norm()
    assert (weights(found) - weights(expected)).norm() < 0.05 * moved


@pytest.mark.e2e
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "settings",
    [
        {"loss": {"type": "ppo", "kl_coef": 0.1, "entropy_coef": 0.01}},
        {"optim": {"type": "muon"}, "loss": {"type": "decoupled_ppo"}},
        {"optim": {"type": "sgd"}, "loss": {"type": "gspo"}},
        {"model": {"ac": {}}, "loss": {"type": "cispo"}},
        {"model": {"experimental": {"lora": {"rank": 4}}}, "loss": {"type": "cispo", "kl_coef": 0.1}},
    ],
    ids=["adamw", "muon", "sgd", "recomputed", "lora"],
)
def test_a_run_that_goes_on_from_a_checkpoint(tmp_path, tiny_model, batches, take, device, settings):
    settings = {**settings, "model": {"compute_dtype": "float32", **settings.get("model", {})}}
    warm = [replace(b, samples=tuple(replace(s, temperature=0.9) for s in b.samples)) for b in batches]
    for name in ("cpu", device):
        take(name)
        run = tmp_path / name
        put(run, warm)
        run_trainer(trainer_config(tiny_model, run, max_steps=2, ckpt={"interval": 2}, **settings))
        run_trainer(trainer_config(tiny_model, run, max_steps=4, ckpt={"resume_step": -1}, **settings))
    found, expected = tmp_path / device / "weights", tmp_path / "cpu" / "weights"
    assert_close(found / "step_4", expected / "step_4", before=expected / "step_2")
    for one, other in zip(records(tmp_path / device), records(tmp_path / "cpu"), strict=True):
        for key in ("loss", "entropy", "mismatch_kl"):
            assert one[key] == pytest.approx(other[key], rel=1e-2, abs=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_fine_tuning(tmp_path, tiny_model, take, device):
    path = tmp_path / "chat.jsonl"
    pairs = [("one", "waŋži"), ("two", "nuŋpa"), ("three", "yamni"), ("four", "topa")]
    lines = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in pairs
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    for name in ("cpu", device):
        take(name)
        run_sft(
            sft_config(
                tiny_model,
                tmp_path / name,
                batch_size=3,
                max_steps=3,
                data={"path": str(path), "val_path": str(path), "seed": 0},
                model={"compute_dtype": "float32"},
            )
        )
    found, expected = (tmp_path / name / "weights" / "step_3" for name in (device, "cpu"))
    assert_close(found, expected, before=tiny_model)
