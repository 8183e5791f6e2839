"""More than one optimizer update per batch."""

import os
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from buckeye.base.faults import FAULTS, FAULTS_DONE
from buckeye.trainer.mini_batches import mini_batches
from buckeye.transport.batches import (
    Batch,
    Sample,
    read_batch,
    read_trained_batch,
)
from buckeye.transport.checkpoint import list_checkpoints
from tests.trainer.ranks import SCRIPT, launch
from tests.trainer.rl_runs import ME, put, records
from tests.trainer.trainer_config import trainer_config

EXACT_SGD = {"type": "sgd", "lr": 0.5, "momentum": 0.0, "weight_decay": 0.0, "max_norm": None}


def _sample(group: int) -> Sample:
    return Sample(
        token_ids=np.zeros(3, np.int32),
        loss_mask=np.array([False, True, True]),
        logprobs=np.zeros(3, np.float32),
        versions=np.zeros(3, np.int32),
        advantages=np.ones(3, np.float32),
        temperature=1.0,
        group=group,
    )


def _batch(*groups: int, step: int = 0) -> Batch:
    return Batch(step=step, samples=tuple(map(_sample, groups)), orchestrator_state={})


def _groups(batch: Batch, **settings) -> list[list[int]]:
    named = {"count": 1, "epochs": 1, "seed": 0, **settings}
    return [[sample.group for sample in part.samples] for part in mini_batches(batch, **named)]


def test_mini_batches_have_whole_groups_and_every_sample_once():
    batch = _batch(0, 0, 0, 1, 1, 2, 3, 3, 4)
    parts = _groups(batch, count=2)
    assert sorted(group for part in parts for group in part) == [0, 0, 0, 1, 1, 2, 3, 3, 4]
    assert sorted(len(set(part)) for part in parts) == [2, 3]
    assert not set(parts[0]) & set(parts[1])


def test_epochs_differ_and_a_repeated_step_does_not():
    batch = _batch(*range(12))
    first = _groups(batch, count=3, epochs=2)
    assert len(first) == 6
    assert first[:3] != first[3:]
    assert _groups(batch, count=3, epochs=2) == first
    assert _groups(batch, count=3, epochs=2, seed=1) != first
    assert _groups(replace(batch, step=1), count=3, epochs=2) != first


def test_one_mini_batch_is_the_batch_and_no_mini_batch_is_without_a_group():
    batch = _batch(5, 5, 6)
    assert list(mini_batches(batch, count=1, epochs=2, seed=0)) == [batch, batch]
    assert sorted(_groups(batch, count=8)) == [[5, 5], [6]]
    assert _groups(_batch(), count=8) == [[]]


@pytest.fixture
def grouped(batches):
    """Batches of three groups with three samples each."""
    return [
        replace(batch, samples=tuple(replace(s, group=i // 3) for i, s in enumerate(batch.samples)))
        for batch in batches
    ]


def _loss(model, samples) -> torch.Tensor:
    """Return -sum(r A) / tokens, recomputed with transformers. No ratio is out of bounds."""
    total, tokens = torch.zeros(()), 0
    for sample in samples:
        ids, mask = torch.from_numpy(sample.token_ids).long(), torch.from_numpy(sample.loss_mask)[1:]
        logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0][mask]
        ratios = (logprobs - torch.from_numpy(sample.logprobs)[1:][mask]).exp()
        assert ((ratios > 0.125) & (ratios < 8)).all()
        total = total - (ratios * torch.from_numpy(sample.advantages)[1:][mask]).sum()
        tokens += int(mask.sum())
    return total / tokens


def test_two_mini_batches_in_two_epochs_are_four_updates(tmp_path, train, tiny_model, grouped):
    """Each update recomputed by hand: the mini-batch's own mean, and the sampler as the old policy."""
    batch = grouped[0]
    train(tmp_path, [batch], optim=EXACT_SGD, mini_batches=2, epochs_per_batch=2)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    losses, norms = [], []
    for part in mini_batches(batch, count=2, epochs=2, seed=0):
        assert len(part.samples) in (3, 6)
        model.zero_grad()
        loss = _loss(model, part.samples)
        loss.backward()
        gradients = [p.grad for p in model.parameters()]
        losses.append(float(loss.detach()))
        norms.append(float(torch.nn.utils.get_total_norm(gradients)))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 0.5 * gradient
    published = load_file(tmp_path / "weights" / "step_1" / "model.safetensors")
    for name, tensor in model.state_dict().items():
        if name in published:
            torch.testing.assert_close(published[name], tensor, rtol=1e-4, atol=1e-5)
    (record,) = records(tmp_path)
    assert (record["step"], record["updates"]) == (0, 4)
    assert record["loss"] == pytest.approx(sum(losses) / 4, rel=1e-4)
    assert record["grad_norm"] == pytest.approx(sum(norms) / 4, rel=1e-4)
    assert record["trained_tokens"] == 2 * sum(int(s.loss_mask.sum()) for s in batch.samples)


def test_the_recorded_log_probs_are_from_before_the_first_update_of_a_sample(tmp_path, train, grouped):
    train(tmp_path / "one", grouped[:1])
    train(tmp_path / "four", grouped[:1], mini_batches=2, epochs_per_batch=2)
    batch, one = read_trained_batch(tmp_path / "one" / "trained", 0)
    _, four = read_trained_batch(tmp_path / "four" / "trained", 0)
    first = next(mini_batches(batch, count=2, epochs=2, seed=0))
    in_first = [any(s is sample for s in first.samples) for sample in batch.samples]
    assert four.record["first_update"] == [i for i, is_in in enumerate(in_first) if is_in]
    assert "first_update" not in one.record
    counts = np.cumsum([int(s.loss_mask.sum()) for s in batch.samples])[:-1]
    for is_in, a, b in zip(in_first, *(np.split(t.logprobs, counts) for t in (one, four)), strict=True):
        assert np.isfinite(b).all()
        assert np.allclose(a, b, atol=1e-5) == is_in


def test_tokens_are_one_version_older_after_an_update(tmp_path, train, grouped):
    """So `mismatch_kl_fresh` measures the engine, and `decoupled_ppo` clips around the sampler."""
    train(tmp_path / "one", grouped[:1])
    train(tmp_path / "two", grouped[:1], epochs_per_batch=2)
    one, two = records(tmp_path / "one")[0], records(tmp_path / "two")[0]
    assert two["mismatch_kl_fresh"] == pytest.approx(one["mismatch_kl_fresh"], rel=1e-5)
    assert two["mismatch_kl"] > 2 * one["mismatch_kl"]
    assert two["staleness_max"] == one["staleness_max"] == 0


def test_a_skipped_update_leaves_the_other_updates(tmp_path, train, grouped):
    first = next(mini_batches(grouped[0], count=3, epochs=1, seed=0)).samples[0]
    poisoned = replace(first, advantages=np.full_like(first.advantages, 3e38))
    samples = tuple(poisoned if s is first else s for s in grouped[0].samples)
    train(tmp_path, [replace(grouped[0], samples=samples)], mini_batches=3)
    (record,) = records(tmp_path)
    assert (record["updates"], record["skipped"], record["skipped_steps"]) == (3, 1, 1)
    assert "Step 0: update 1 of 3 skipped" in (tmp_path / "logs" / "run.log").read_text()
    kept = read_batch(tmp_path / "skipped", 0, identity=ME)
    assert [sample.group for sample in kept.samples] == [first.group] * 3
    before, after = (load_file(tmp_path / f"weights/step_{n}/model.safetensors") for n in (0, 1))
    assert not all(torch.equal(before[name], after[name]) for name in before)
    assert all(tensor.isfinite().all() for tensor in after.values())


MANY = {"mini_batches": 2, "epochs_per_batch": 2, "scheduler": {"type": "cosine", "warmup": 1}}


def _final(run) -> dict[str, torch.Tensor]:
    return load_file(run / "weights" / "step_4" / "model.safetensors")


@pytest.mark.e2e
def test_a_step_that_was_killed_between_its_updates_is_repeated(tmp_path, train, tiny_model, grouped):
    straight, broken, marks = tmp_path / "straight", tmp_path / "broken", tmp_path / "marks"
    marks.mkdir()
    train(straight, grouped, **MANY)
    put(broken, grouped)
    config = trainer_config(tiny_model, broken, max_steps=4, ckpt={"interval": 2}, **MANY)
    (tmp_path / "config.json").write_text(config.model_dump_json())
    environment = {
        **os.environ,
        FAULTS: "trainer.step=kill@15",  # the third update of step 3
        FAULTS_DONE: str(marks),
        "BUCKEYE_THREADS": "1",
    }
    command = [sys.executable, str(SCRIPT), str(tmp_path / "config.json")]
    killed = subprocess.run(command, env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    checkpoints = [info.step for info in list_checkpoints(broken / "checkpoints")]
    assert checkpoints in ([2], [])  # it was written during step 2, on a slow disk also during step 3
    train(broken, grouped[sum(checkpoints) :], attempt=2, max_steps=4, ckpt={"resume_step": -1}, **MANY)
    assert all(torch.equal(tensor, _final(broken)[name]) for name, tensor in _final(straight).items())
    for key in ("loss", "grad_norm", "lr", "updates"):
        last = {r["step"]: r[key] for r in records(broken)}  # steps after the checkpoint are repeated
        assert last == {r["step"]: r[key] for r in records(straight)}


@pytest.mark.e2e
def test_two_shards_make_the_updates_of_one_rank(tmp_path, train, tiny_model, grouped):
    settings = {**MANY, "optim": {**EXACT_SGD, "lr": 0.02}}
    train(tmp_path / "one", grouped, **settings)
    two = tmp_path / "two"
    put(two, grouped)
    config = trainer_config(tiny_model, two, max_steps=4, model={"sharding": "full"}, **settings)
    (two / "config.json").write_text(config.model_dump_json())
    launch(2, str(SCRIPT), str(two / "config.json"))
    for name, tensor in _final(tmp_path / "one").items():
        torch.testing.assert_close(_final(two)[name], tensor, rtol=1e-3, atol=1e-4)
    assert [r["updates"] for r in records(two)] == [4] * 4
