"""Steps recomputed from their kept data, and the size of that data."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from tests.trainer.rl_runs import put, records
from tests.trainer.trainer_config import trainer_config
from transformers import AutoModelForCausalLM

from buckeye.analysis.replay.replay_step import replay_step
from buckeye.base.disk import size_of
from buckeye.errors import TransportError, UsageError
from buckeye.trainer import batch_loss, learner
from buckeye.trainer.model.policy import PolicyNetwork
from buckeye.trainer.rl import run_trainer
from buckeye.transport.batches import read_trained_batch

pytestmark = pytest.mark.e2e


def trained(directory, tiny_model, batches, **settings):
    """Train a run on all batches, with a checkpoint after the second, and return its configuration."""
    put(directory, batches)
    config = trainer_config(tiny_model, directory, max_steps=len(batches), ckpt={"interval": 2}, **settings)
    run_trainer(config)
    return config


def again(run, config, step, scratch, *, until="weights"):
    scratch.mkdir()
    return replay_step(run, config, step, until=until, device=None, scratch=scratch)


def hashes(directory):
    return {
        path: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.rglob("*") if path.is_file()
    }


def coarse(made, *given):
    logprobs, entropies = made(*given)
    return logprobs.bfloat16().float(), entropies


def scaled_loss(made, *given):
    sums = made(*given)
    return replace(sums, loss=1.01 * sums.loss)


def narrow(made, inputs, config):
    return made(inputs, config.model_copy(update={"mask_ratio_high": 1.0005}))


def clipped(made, grads, norm, limit):
    return made(grads, norm, 0.01)


def faster(made, *given, **named):
    return 1.1 * made(*given, **named)


def changed(change, made):
    """Return the change as a function, so that it is bound when it replaces a method."""
    return lambda *given, **named: change(made, *given, **named)


FAULTS = {
    "coarse log-softmax": ("log-probs", PolicyNetwork, "forward", coarse),
    "loss scaled": ("loss", batch_loss, "total_loss", scaled_loss),
    "bounds of the ratio": ("loss", batch_loss, "total_loss", narrow),
    "gradients clipped": ("weights", learner, "clip_gradients", clipped),
    "learning rate": ("weights", learner.LearningRateSchedule, "at", faster),
}
"""Faults: the stage that must differ, and the changed code."""


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_unchanged_code_computes_a_step_to_the_last_bit(tmp_path, tiny_model, batches, optimizer):
    run = tmp_path / "run"
    config = trained(run, tiny_model, batches, optim={"type": optimizer}, scheduler={"type": "cosine"})
    before = hashes(run)
    for step, start in ((1, 0), (3, 2)):  # from the model, and from a checkpoint
        found = again(run, config, step, tmp_path / f"again_{step}")
        assert (found.start.step, found.first_difference, found.changed) == (start, None, {})
        assert [one.stage for one in found.comparisons[-4:]] == ["log-probs", "loss", "gradient", "weights"]
        assert found.comparisons[-2].recorded == repr(records(run)[step]["grad_norm"])
    alone = again(run, config, 2, tmp_path / "again_2", until="gradient")
    assert (alone.start.path, alone.first_difference) == (run / "weights" / "step_2", None)
    assert hashes(run) == before


def test_a_step_of_several_updates_is_computed_from_a_checkpoint(tmp_path, tiny_model, batches):
    """Its gradients after the first update need the optimizer's state, which weights do not have."""
    run = tmp_path / "run"
    grouped = [
        replace(batch, samples=tuple(replace(s, group=i // 3) for i, s in enumerate(batch.samples)))
        for batch in batches
    ]
    config = trained(run, tiny_model, grouped, mini_batches=2, epochs_per_batch=2)
    for step, start, until in ((1, 0, "weights"), (3, 2, "gradient")):
        found = again(run, config, step, tmp_path / f"again_{step}", until=until)
        assert (found.start.step, found.first_difference) == (start, None)
        assert found.comparisons[-1].step == step


def test_the_first_difference_is_named(tmp_path, tiny_model, batches):
    run = tmp_path / "run"
    config = trained(run, tiny_model, batches)
    faster = config.model_copy(update={"optim": config.optim.model_copy(update={"lr": 2 * config.optim.lr})})
    found = again(run, faster, 3, tmp_path / "faster")
    assert (found.first_difference.step, found.first_difference.stage) == (2, "weights")
    of_tokens = next(one for one in found.comparisons if one.step == 3)
    number, token = map(int, of_tokens.where.replace("sample ", "").split(", token "))
    assert batches[3].samples[number].loss_mask[token]

    for name, (stage, owner, attribute, change) in FAULTS.items():
        with mock.patch.object(owner, attribute, changed(change, getattr(owner, attribute))):
            found = again(run, config, 3, tmp_path / name)
        assert (found.first_difference.step, found.first_difference.stage) == (2, stage), name


def test_what_is_kept_is_the_batch_and_the_log_probs_of_the_model(tmp_path, tiny_model, batches):
    trained(tmp_path, tiny_model, batches[:1])
    batch, kept = read_trained_batch(tmp_path / "trained", 0)
    assert [list(s.token_ids) for s in batch.samples] == [list(s.token_ids) for s in batches[0].samples]
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    expected = []
    for number in kept.samples:
        sample = batch.samples[number]
        with torch.no_grad():
            logits = model(torch.from_numpy(sample.token_ids.astype(np.int64))[None]).logits[0]
        logprobs = (logits / sample.temperature).log_softmax(-1)
        expected += [logprobs[t - 1, sample.token_ids[t]] for t in np.flatnonzero(sample.loss_mask)]
    assert np.allclose(kept.logprobs, np.array(expected), atol=1e-4)
    tokens = sum(len(sample.token_ids) for sample in batch.samples)
    size = sum(path.stat().st_size for path in (tmp_path / "trained/step_0").glob("*.safetensors"))
    assert size - 1024 < 24 * tokens  # the headers of two files


def test_old_steps_are_let_go(tmp_path, tiny_model, batches):
    def steps(name, **settings):
        trained(tmp_path / name, tiny_model, batches, trained=settings)
        assert not list((tmp_path / name / "batches").iterdir())
        return sorted(path.name for path in (tmp_path / name / "trained").glob("*"))

    assert steps("all") == ["step_0", "step_1", "step_2", "step_3"]
    one = size_of(tmp_path / "all/trained/step_3")
    assert steps("two", keep=2) == ["step_2", "step_3"]
    assert steps("bytes", max_bytes=one + one // 2) == ["step_3"]
    assert steps("order", max_bytes=1, record_order=True) == ["step_0", "step_1", "step_2", "step_3"]
    assert steps("none", keep=0) == []


def test_a_place_that_cannot_be_written_is_no_reason_to_end(tmp_path, tiny_model, batches, capsys):
    tmp_path.joinpath("trained").write_text("not a folder")
    trained(tmp_path, tiny_model, batches[:2])
    assert len(records(tmp_path)) == 2
    assert "batch 0" in capsys.readouterr().out


def test_steps_that_come_again_are_forgotten_first(tmp_path, tiny_model, batches, monkeypatch):
    trained(tmp_path, tiny_model, batches)
    monkeypatch.setenv("BUCKEYE_ATTEMPT", "2")
    config = trainer_config(tiny_model, tmp_path, max_steps=2, ckpt={"resume_step": 2})
    run_trainer(config)
    assert sorted(path.name for path in (tmp_path / "trained").iterdir()) == ["step_0", "step_1"]


def test_what_is_not_there_is_said(tmp_path, tiny_model, batches):
    config = trained(tmp_path, tiny_model, batches[:2], trained={"keep": 1})
    with pytest.raises(UsageError, match="batch 7"):
        again(tmp_path, config, 7, tmp_path / "seven")
    for checkpoint in (tmp_path / "checkpoints").iterdir():
        checkpoint.rename(tmp_path / checkpoint.name)
    with pytest.raises(UsageError, match=r"(?i)steps that can be replayed: none"):
        again(tmp_path, config, 1, tmp_path / "one")
    (tmp_path / "trained/step_1/trained.safetensors").write_bytes(b"no tensors")
    with pytest.raises(TransportError, match="step_1"):
        read_trained_batch(tmp_path / "trained", 1)
