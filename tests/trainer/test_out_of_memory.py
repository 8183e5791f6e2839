"""Out of memory: all ranks repeat the step in smaller rows, with the same result.

Ranks that divide a model exit instead, and their next attempt starts with smaller rows.
"""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from buckeye.base import faults
from buckeye.config.trainer import ModelConfig
from buckeye.errors import RunError
from buckeye.monitor.metrics import read_metrics
from buckeye.trainer.micro_batch_size import MICRO_BATCH_FILE, is_out_of_memory
from buckeye.trainer.rl import run_trainer
from buckeye.trainer.sft import run_sft
from buckeye.transport.batches import Batch, Sample
from tests.trainer.ranks import SCRIPT, launch
from tests.trainer.rl_runs import put
from tests.trainer.trainer_config import sft_config, trainer_config

STEPS, LENGTH, ROW = 2, 20, 45  # two samples fit into a row


def _sample(rng, step: int) -> Sample:
    mask = np.arange(LENGTH) >= 8
    return Sample(
        token_ids=rng.integers(0, 256, LENGTH).astype(np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -5.5, 0).astype(np.float32),
        versions=np.where(mask, step, -1).astype(np.int32),
        advantages=np.full(LENGTH, rng.normal(), np.float32),
        temperature=1.0,
    )


@pytest.fixture(scope="module")
def batches():
    rng = np.random.default_rng(0)
    return [
        Batch(step=step, samples=tuple(_sample(rng, step) for _ in range(6)), orchestrator_state={})
        for step in range(STEPS)
    ]


@pytest.fixture
def fault(tmp_path, monkeypatch):
    """Return `fault(entries)`; `fault("trainer.oom=oom@2")` lets it occur once from now on."""

    def set_up(entries: str) -> None:
        marks = tmp_path / "marks"
        marks.mkdir(exist_ok=True)
        monkeypatch.setenv(faults.FAULTS, entries)
        monkeypatch.setenv(faults.FAULTS_DONE, str(marks))
        monkeypatch.setattr(faults, "_visits", Counter())

    return set_up


def _config(model: Path, run: Path, **changes):
    settings = {"seq_len": ROW, "max_steps": STEPS, "loss": {"mask_ratio_low": 0.0, "mask_ratio_high": 1e9}}
    return trainer_config(model, run, **{**settings, **changes})


def _train(model: Path, run: Path, batches, **changes) -> Path:
    put(run, batches)
    run_trainer(_config(model, run, **changes))
    return run


def _records(run: Path, process: str = "trainer"):
    return [r for r in read_metrics(run / "metrics.jsonl") if r["process"] == process]


def _assert_same_training(run: Path, undisturbed: Path) -> None:
    for one, other in zip(_records(run), _records(undisturbed), strict=True):
        for name in ("loss", "entropy", "grad_norm", "mismatch_kl", "tokens_computed", "ratio_mean"):
            assert one[name] == pytest.approx(other[name], rel=1e-4), name
    one, other = (
        load_file(r / "weights" / f"step_{STEPS}" / "model.safetensors") for r in (run, undisturbed)
    )
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-5)


def test_out_of_memory_retries_the_step_with_half_the_tokens(tmp_path, tiny_model, batches, fault):
    undisturbed = _train(tiny_model, tmp_path / "undisturbed", batches)
    fault("trainer.oom=oom@2")  # at the second of three rows: the first has left a gradient
    run = _train(tiny_model, tmp_path / "run", batches)
    _assert_same_training(run, undisturbed)
    assert [(r["micro_batch_tokens"], r["oom_retries"]) for r in _records(undisturbed)] == [(ROW, 0)] * STEPS
    assert [(r["micro_batch_tokens"], r["oom_retries"]) for r in _records(run)] == [(LENGTH, 1)] * STEPS


@pytest.mark.parametrize(("settings", "second"), [({}, (LENGTH, 1)), ({"seq_len": 60}, (60, 0))])
def test_later_attempt_starts_with_the_lowered_limit(tmp_path, tiny_model, batches, fault, settings, second):
    """With other settings it starts with the full size again."""
    fault("trainer.oom=oom")
    ckpt = {"interval": 1}
    _train(tiny_model, tmp_path, batches[:1], max_steps=1, ckpt=ckpt)
    _train(tiny_model, tmp_path, batches[1:], ckpt={**ckpt, "resume_step": 1}, **settings)
    assert [(r["micro_batch_tokens"], r["oom_retries"]) for r in _records(tmp_path)] == [(LENGTH, 1), second]


def test_out_of_memory_with_one_sample_ends_the_trainer(tmp_path, tiny_model, batches, fault):
    fault("trainer.oom=oom,trainer.oom=oom@2")
    message = "with 20 tokens per micro-batch; the longest sample has 20"
    with pytest.raises(RunError, match=message):
        _train(tiny_model, tmp_path, batches)
    assert not _records(tmp_path)


def test_out_of_memory_retries_a_fine_tuning_step(tmp_path, tiny_model, fault):
    chat = tmp_path / "chat.jsonl"
    turns = [{"role": "user", "content": "one two three"}, {"role": "assistant", "content": "waŋži nuŋpa"}]
    chat.write_text("\n".join(json.dumps({"messages": turns[:1] + turns[1:]}) for _ in range(6)))

    def fine_tune(run: Path) -> Path:
        data = {"path": str(chat), "val_path": None, "seed": 0}
        run_sft(sft_config(tiny_model, run, batch_size=3, data=data, max_steps=STEPS, seq_len=130))
        return run

    undisturbed = fine_tune(tmp_path / "undisturbed")
    fault("trainer.oom=oom")
    run = fine_tune(tmp_path / "run")
    assert [r["oom_retries"] for r in _records(run, "sft")] == [1] * STEPS
    for one, other in zip(_records(run, "sft"), _records(undisturbed, "sft"), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)


def test_out_of_memory_ends_sharded_ranks_and_lowers_the_next_limit(
    tmp_path, tiny_model, batches, fault, refusal
):
    divided = {"model": ModelConfig(name=str(tiny_model), device="cpu", sharding="full")}
    fault("trainer.oom=oom@2")
    put(tmp_path, batches)
    config = _config(tiny_model, tmp_path).model_copy(update=divided)
    with refusal(RunError):
        run_trainer(config)
    assert json.loads((tmp_path / MICRO_BATCH_FILE).read_text())["tokens"] == LENGTH
    run_trainer(config)
    assert [(r["micro_batch_tokens"], r["oom_retries"]) for r in _records(tmp_path)] == [(LENGTH, 1)] * STEPS


@pytest.mark.e2e
def test_out_of_memory_retries_on_unsharded_ranks_together(tmp_path, tiny_model, batches):
    undisturbed = _train(tiny_model, tmp_path / "undisturbed", batches)
    run = tmp_path / "run"
    put(run, batches)
    (run / "config.json").write_text(_config(tiny_model, run).model_dump_json())
    (tmp_path / "marks").mkdir()
    failing = {faults.FAULTS: "trainer.oom=oom", faults.FAULTS_DONE: str(tmp_path / "marks")}
    launch(2, str(SCRIPT), str(run / "config.json"), last_rank=failing)
    _assert_same_training(run, undisturbed)
    assert [(r["micro_batch_tokens"], r["oom_retries"]) for r in _records(run)] == [(LENGTH, 1)] * STEPS


def test_main_memory_errors_of_torch_are_recognized():
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**58, dtype=torch.uint8)
    assert is_out_of_memory(raised.value)
    with pytest.raises(RuntimeError) as raised:
        torch.zeros(2) @ torch.zeros(3)
    assert not is_out_of_memory(raised.value)
