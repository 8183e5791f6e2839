"""Models that transformers computes: log-probs and gradients of the trainer equal those of transformers."""

import numpy as np
import pytest
import torch

from buckeye.errors import UsageError
from buckeye.trainer.data.packing import pack_micro_batch, plan_bins
from buckeye.trainer.model.policy import load_policy
from buckeye.trainer.output.hf_directory import save_model
from tests.general_models import QUICK, VOCAB, tiny_model

CPU = torch.device("cpu")
PACKED = ("gemma", "nemotron", "mixtral")
TOLERANCE = 1e-4


def draw_samples():
    """Return samples with a shared prefix, and others, and their masks."""
    rng = np.random.default_rng(0)
    samples = [rng.integers(0, VOCAB, n).astype(np.int32) for n in (17, 9, 12, 12)]
    samples[3][:8] = samples[2][:8]
    masks = [np.arange(len(ids)) >= len(ids) // 2 for ids in samples]
    return samples, masks


@pytest.mark.parametrize("family", QUICK)
def test_logprobs_and_gradients_equal_transformers(family, tmp_path):
    plain = tiny_model(family)
    plain.save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path), CPU, compute_dtype="float32")
    samples, masks = draw_samples()
    row = pack_micro_batch(samples, masks, CPU)
    temperatures = torch.full((len(row.targets),), 0.7)
    logprobs, entropies = policy(row, temperatures)
    expected, spread = [], []
    for ids, mask in zip(samples, masks, strict=True):
        tokens = torch.from_numpy(ids).long()
        log_p = (plain(tokens[None], use_cache=False).logits[0] / 0.7).log_softmax(-1)
        at = torch.from_numpy(np.flatnonzero(mask))
        expected.append(log_p[at - 1, tokens[at]])
        spread.append(-(log_p.exp() * log_p).sum(-1)[at - 1])
    torch.testing.assert_close(logprobs, torch.cat(expected), rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(entropies, torch.cat(spread), rtol=0, atol=TOLERANCE)
    (logprobs.sum() + entropies.sum()).backward()
    (torch.cat(expected).sum() + torch.cat(spread).sum()).backward()
    gradients = {name: p.grad for name, p in plain.named_parameters()}
    for name, parameter in policy.trainable.items():
        wanted = gradients[name]
        if wanted is None:
            assert parameter.grad is None or not parameter.grad.any(), name
        else:
            torch.testing.assert_close(parameter.grad, wanted, rtol=1e-3, atol=1e-3)
    save_model(policy.model, {}, tmp_path / "out", dtype=torch.float32)
    again = type(plain).from_pretrained(tmp_path / "out")
    ids = torch.from_numpy(samples[0]).long()[None]
    torch.testing.assert_close(again(ids).logits, plain(ids).logits, rtol=0, atol=TOLERANCE)
    assert torch.allclose(policy.logits(ids[0], slice(None)), plain(ids).logits[0], atol=TOLERANCE)


def test_padded_bins_have_every_sample_once_and_fit():
    samples = [np.zeros(n, np.int32) for n in (5, 9, 3, 9, 1, 7)]
    bins = plan_bins(samples, 20, padded=True)
    assert sorted(i for b in bins for i in b.indices) == list(range(len(samples)))
    assert [b.tokens for b in bins] == [
        max(len(samples[i]) for i in b.indices) * len(b.indices) for b in bins
    ]
    assert max(b.tokens for b in bins) <= 20


def test_model_without_causal_attention_is_refused(tmp_path):
    tiny_model("bert", is_decoder=True).save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path), CPU)
    assert policy.padded
    tiny_model("bert").save_pretrained(tmp_path / "encoder")
    with pytest.raises(UsageError, match="encoder"):
        load_policy(str(tmp_path / "encoder"), CPU)


def test_general_model_cannot_be_sharded(tmp_path):
    tiny_model("bloom").save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="cannot be sharded"):
        load_policy(str(tmp_path), CPU, sharded=True)
