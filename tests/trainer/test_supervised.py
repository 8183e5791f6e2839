"""Conversations that every RL update also trains on."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from buckeye.analysis.replay.replay_step import replay_all, replay_step
from buckeye.base import faults
from buckeye.base.storage import step_directory
from buckeye.errors import CheckpointError
from buckeye.trainer.data.chat_data import ChatFile, ChatFormat
from buckeye.transport.batches import read_trained_batch
from tests.trainer.ranks import SCRIPT, launch
from tests.trainer.rl_runs import put, records
from tests.trainer.trainer_config import trainer_config

EXACT_SGD = {"type": "sgd", "lr": 0.5, "momentum": 0.0, "weight_decay": 0.0, "max_norm": None}
NO_MASK = {"mask_ratio_low": 0.0, "mask_ratio_high": 1e9}


@pytest.fixture(scope="session")
def chats(tmp_path_factory):
    """Seven short conversations of different lengths."""
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    roles = [{"role": "user", "content": "?"}]
    lines = [[*roles, {"role": "assistant", "content": "abc"[: 1 + i % 3] * (1 + i)}] for i in range(7)]
    path.write_text("".join(json.dumps({"messages": line}) + "\n" for line in lines))
    return path


def supervised(chats, **changes):
    return {"path": str(chats), "batch_size": 3, "coef": 0.5, **changes}


def weights(run, step):
    return load_file(step_directory(run / "weights", step) / "model.safetensors")


def taken(model, chats, position, count):
    return ChatFile(chats, ChatFormat(str(model)), seed=0, seq_len=64).take(position, count)


def logprobs_of(model, ids):
    logits = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, torch.from_numpy(ids[1:].astype(np.int64))[:, None])[:, 0]


def test_gradient_is_that_of_the_sum_of_both_losses(tmp_path, tiny_model, train, batches, chats):
    """One step of exact SGD moves the weights by -lr times the gradient of the sum, computed by hand.

    The loss of rollouts is -mean(r A) over their tokens. That of conversations is -0.5 mean(log pi) over
    theirs.
    """
    train(tmp_path, batches[:1], optim=EXACT_SGD, loss=NO_MASK, supervised=supervised(chats))
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    rollouts, examples = batches[0].samples, taken(tiny_model, chats, 0, 3)
    terms = []
    for sample in rollouts:
        mask = torch.from_numpy(sample.loss_mask[1:])
        sampler = torch.from_numpy(sample.logprobs[1:])
        ratios = (logprobs_of(model, sample.token_ids) - sampler).exp()
        terms.append((ratios * torch.from_numpy(sample.advantages[1:]))[mask])
    right = [logprobs_of(model, s.token_ids)[torch.from_numpy(s.loss_mask[1:])] for s in examples]
    policy_loss, cross_entropy = -torch.cat(terms).mean(), -torch.cat(right).mean()
    total = policy_loss + 0.5 * cross_entropy
    total.backward()
    record = records(tmp_path)[0]
    assert record["loss"] == pytest.approx(total.item(), rel=1e-4, abs=1e-6)
    assert record["supervised/loss"] == pytest.approx(cross_entropy.item(), rel=1e-5)
    assert record["supervised/tokens"] == len(torch.cat(right))
    after = weights(tmp_path, 1)
    for name, parameter in model.named_parameters():
        if name in after:
            moved = (after[name] - parameter.detach()) / -0.5
            torch.testing.assert_close(moved, parameter.grad, rtol=1e-3, atol=2e-5)


def test_statistics_and_logprobs_of_rollouts_do_not_include_conversations(tmp_path, train, batches, chats):
    still = {"optim": {**EXACT_SGD, "lr": 0.0}}
    train(tmp_path / "both", batches[:1], **still, supervised=supervised(chats))
    train(tmp_path / "alone", batches[:1], **still)
    both, alone = (records(tmp_path / name)[0] for name in ("both", "alone"))
    for name in ("entropy", "mismatch_kl", "ratio_mean", "trained_tokens", "tokens"):
        assert both[name] == pytest.approx(alone[name], rel=1e-4), name
    found = [read_trained_batch(tmp_path / name / "trained", 0)[1].logprobs for name in ("both", "alone")]
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)
    assert not any(name.startswith("supervised") for name in alone)


def test_batch_without_advantages_trains_on_conversations(tmp_path, train, batches, chats):
    idle = [replace(s, advantages=np.zeros_like(s.advantages)) for s in batches[0].samples]
    train(tmp_path, [replace(batches[0], samples=tuple(idle))], supervised=supervised(chats))
    record = records(tmp_path)[0]
    assert record["grad_norm"] > 0
    assert record["loss"] == pytest.approx(0.5 * record["supervised/loss"])
    assert record["empty_steps"] == 0


def test_each_update_takes_the_next_conversations(tmp_path, tiny_model, train, batches, chats):
    """Two epochs of one mini-batch take 6 of 7 conversations per step."""
    still = {"optim": {**EXACT_SGD, "lr": 0.0}, "epochs_per_batch": 2}
    train(tmp_path, batches[:2], **still, supervised=supervised(chats))
    first, second = records(tmp_path)
    assert (first["supervised/epoch"], second["supervised/epoch"]) == pytest.approx((0, 6 / 7))
    for position, record in ((0, first), (6, second)):
        examples = taken(tiny_model, chats, position, 6)
        assert record["supervised/tokens"] == sum(int(s.loss_mask.sum()) for s in examples)


def test_resumed_run_equals_an_uninterrupted_one(tmp_path, train, batches, chats):
    settings = {"supervised": supervised(chats), "ckpt": {"interval": 2}}
    train(tmp_path / "whole", batches, **settings)
    train(tmp_path / "parts", batches[:2], **settings)
    resumed = {**settings, "ckpt": {"interval": 2, "resume_step": 2}, "max_steps": 4}
    train(tmp_path / "parts", batches[2:], attempt=2, **resumed)
    whole, parts = (weights(tmp_path / name, 4) for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert [r["supervised/epoch"] for r in records(tmp_path / "parts")] == pytest.approx(
        [0, 3 / 7, 6 / 7, 9 / 7]
    )


def test_resume_with_changed_conversations_is_refused(tmp_path, train, batches, chats):
    own = tmp_path / "own.jsonl"
    own.write_text(chats.read_text())
    train(tmp_path / "run", batches[:1], supervised=supervised(own), ckpt={"interval": 1})
    own.write_text("".join(chats.read_text().splitlines(keepends=True)[1:]))
    resumed = {"supervised": supervised(own), "ckpt": {"resume_step": 1}, "max_steps": 2}
    with pytest.raises(CheckpointError) as caught:
        train(tmp_path / "run", batches[1:2], attempt=2, **resumed)
    assert caught.value.code == "BK-CHECKPOINT-MISMATCH"
    train(
        tmp_path / "run",
        batches[1:2],
        attempt=2,
        **{**resumed, "ckpt": {"resume_step": 1, "skip_dataloader": True}},
    )
    assert records(tmp_path / "run")[-1]["supervised/epoch"] == 0


def test_replay_repeats_steps_to_the_last_bit(tmp_path, tiny_model, train, batches, chats):
    settings = {"supervised": supervised(chats), "ckpt": None}
    train(tmp_path / "run", batches, **settings)
    config = trainer_config(tiny_model, tmp_path / "run", max_steps=4, **settings)
    scratch = [tmp_path / "all", tmp_path / "one"]
    result = replay_all(tmp_path / "run", config, device=None, scratch=scratch[0], tell=lambda step: None)
    assert (result.step, result.first_difference, result.changed) == (3, None, {})
    alone = replay_step(
        tmp_path / "run", config, 3, until="gradient", device=None, scratch=scratch[1]
    )  # from the published weights
    assert alone.start.path.name == "step_3"
    assert alone.first_difference is None


@pytest.mark.parametrize("sharding", ["none", "full"])
def test_ranks_train_as_one_rank(tmp_path, tiny_model, train, batches, chats, sharding):
    settings = {"optim": EXACT_SGD, "loss": NO_MASK, "supervised": supervised(chats, batch_size=4)}
    train(tmp_path / "one", batches[:2], **settings)
    put(tmp_path / "two", batches[:2])
    config = trainer_config(
        tiny_model, tmp_path / "two", max_steps=2, model={"sharding": sharding}, **settings
    )
    (tmp_path / "config.json").write_text(config.model_dump_json())
    launch(2, str(SCRIPT), str(tmp_path / "config.json"))
    names = ("loss", "grad_norm", "supervised/loss", "supervised/tokens")
    for one, two in zip(records(tmp_path / "one"), records(tmp_path / "two"), strict=True):
        assert [one[n] for n in names] == pytest.approx([two[n] for n in names], rel=1e-3)
    one, two = (weights(tmp_path / name, 2) for name in ("one", "two"))
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-3, atol=1e-4)


def test_memory_that_runs_out_changes_no_gradient(tmp_path, train, batches, chats, monkeypatch):
    """The retry computes rollouts and conversations again. The first row has left a gradient."""
    monkeypatch.setattr(faults, "_visits", Counter())
    settings = {"optim": EXACT_SGD, "loss": NO_MASK, "seq_len": 80, "supervised": supervised(chats)}
    train(tmp_path / "calm", batches[:1], **settings)
    monkeypatch.setenv("BUCKEYE_FAULTS", "trainer.oom=oom@2")
    (tmp_path / "faults").mkdir()
    monkeypatch.setenv("BUCKEYE_FAULTS_DONE", str(tmp_path / "faults"))
    train(tmp_path / "full", batches[:1], **settings)
    calm, full = (records(tmp_path / name)[0] for name in ("calm", "full"))
    assert full["oom_retries"] == 1
    for name in ("loss", "grad_norm", "supervised/loss", "supervised/tokens"):
        assert full[name] == pytest.approx(calm[name], rel=1e-3), name
