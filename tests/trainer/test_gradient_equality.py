"""Packing, shared prefixes, padding and the chunked head leave the gradient unchanged, in float64.

The reference is one plain, padded forward pass with all logits; every loss is compared.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from buckeye.config.losses import LossConfig
from buckeye.trainer.data.packing import pack_micro_batch, plan_bins
from buckeye.trainer.losses.base import LossInputs
from buckeye.trainer.losses.policy_gradient import LOSS_TYPES, total_loss
from buckeye.trainer.model import logprobs as head
from buckeye.trainer.model.attention import PACKED_ATTENTION
from buckeye.trainer.model.policy import PolicyNetwork
from buckeye.trainer.model.rms_norm import RMSNorm, replace_norms
from tests.trainer.conftest import SHAPE

CPU = torch.device("cpu")
SHAPES = {
    "qwen3": (Qwen3Config, {}),
    "qwen2, sliding windows": (
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "llama": (LlamaConfig, {"tie_word_embeddings": False}),
}


class _PlainNorm(torch.nn.Module):
    """RMS norm in the dtype of its input; transformers' modules always compute it in float32."""

    def __init__(self, weight, epsilon):
        super().__init__()
        self.weight, self.epsilon = weight, epsilon

    def forward(self, x):
        return self.weight * x / (x.square().mean(-1, keepdim=True) + self.epsilon).sqrt()


def _model(name, attention):
    config_class, changes = SHAPES[name]
    torch.manual_seed(0)
    config = config_class(**{**SHAPE, "vocab_size": 40, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0) if parameter.dim() == 2 else parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module", params=list(SHAPES))
def models(request):
    """A plain transformers model, and a policy with the same weights."""
    plain, packed = _model(request.param, "sdpa"), _model(request.param, PACKED_ATTENTION)
    for model in (plain, packed):
        replace_norms(model)
    for module in list(plain.modules()):
        for child, norm in module.named_children():
            if isinstance(norm, RMSNorm):
                setattr(module, child, _PlainNorm(norm.weight, norm.epsilon))
    return plain, PolicyNetwork(packed, CPU, compute_dtype=torch.float64, flash=False)


@st.composite
def groups(draw):
    """Draw samples as (token ids, loss mask).

    Prompts have any length. Some samples train one token only, some have several turns, some come from the
    same rollout, and some share nothing.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    samples = []
    for _ in range(draw(st.integers(1, 3))):
        prompt = rng.integers(0, 40, draw(st.integers(1, 15)))
        for _ in range(draw(st.integers(1, 4))):
            own = rng.integers(0, 40, draw(st.integers(1, 12)))
            mask = np.ones(len(own), bool) if draw(st.booleans()) else rng.random(len(own)) < 0.5
            mask[0] |= not mask.any()
            samples.append(
                (np.concatenate([prompt, own]), np.concatenate([np.zeros(len(prompt), bool), mask]))
            )
    if draw(st.booleans()):
        samples.append(samples[0])
    return [(ids.astype(np.int32), mask) for ids, mask in samples]


def _columns(samples):
    rng = np.random.default_rng(0)
    return [
        {
            "sampler_logprobs": torch.from_numpy(-rng.random(mask.sum()) * 4),
            "reference_logprobs": torch.from_numpy(-rng.random(mask.sum()) * 4),
            "advantages": torch.full((int(mask.sum()),), rng.normal(), dtype=torch.float64),
            "staleness": torch.from_numpy(rng.integers(0, 4, mask.sum())),
        }
        for _, mask in samples
    ]


def _inputs(logprobs, entropies, sequences, columns):
    joined = {name: torch.cat([c[name] for c in columns]) for name in columns[0]}
    return LossInputs(logprobs=logprobs, entropies=entropies, sequences=sequences, **joined)


def _plain_gradient(model, samples, columns, temperatures, loss):
    """Compute the gradient of one padded batch with all logits."""
    model.zero_grad()
    longest = max(len(ids) for ids, _ in samples)
    batch = torch.zeros(len(samples), longest, dtype=torch.long)
    real = torch.zeros(len(samples), longest, dtype=torch.long)
    for row, (ids, _) in enumerate(samples):
        batch[row, : len(ids)], real[row, : len(ids)] = torch.from_numpy(ids).long(), 1
    logits = model(input_ids=batch, attention_mask=real).logits
    logprobs, entropies, sequences = [], [], []
    for number, (ids, mask) in enumerate(samples):
        trained = torch.from_numpy(np.flatnonzero(mask))
        log_p = (logits[number, trained - 1] / temperatures[number]).log_softmax(-1)
        logprobs.append(log_p.gather(1, torch.from_numpy(ids).long()[trained, None]).squeeze(1))
        entropies.append(-(log_p.exp() * log_p).sum(-1))
        sequences.append(torch.full((len(trained),), number))
    inputs = _inputs(torch.cat(logprobs), torch.cat(entropies), torch.cat(sequences), columns)
    value = total_loss(inputs, loss).loss
    value.backward()
    return value.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _packed_gradient(policy, samples, columns, temperatures, loss, capacity):
    policy.model.zero_grad()
    total = 0.0
    for b in plan_bins([ids for ids, _ in samples], capacity):
        row = pack_micro_batch([samples[i][0] for i in b.indices], [samples[i][1] for i in b.indices], CPU)
        each = torch.tensor([temperatures[i] for i in b.indices], dtype=torch.float64)[row.sequences]
        outputs = policy(row, each)
        value = total_loss(_inputs(*outputs, row.sequences, [columns[i] for i in b.indices]), loss).loss
        value.backward()
        total += value.item()
    return total, {n: p.grad for n, p in policy.model.named_parameters() if p.grad is not None}


def _compare(models, samples, loss, *, capacity):
    plain, policy = models
    columns = _columns(samples)
    temperatures = np.random.default_rng(1).uniform(0.5, 1.5, len(samples))
    expected, gradients = _plain_gradient(plain, samples, columns, temperatures, loss)
    found, ours = _packed_gradient(policy, samples, columns, temperatures, loss, capacity)
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert ours.keys() == gradients.keys()
    for name, gradient in gradients.items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(ours[name], gradient, rtol=1e-9, atol=1e-9 * scale + 1e-13, msg=name)


def _loss(**fields):
    return TypeAdapter(LossConfig).validate_python(fields)


@settings(max_examples=10)
@given(samples=groups(), capacity=st.sampled_from([28, 40, 1000]))
def test_any_groups(models, samples, capacity):
    _compare(models, samples, _loss(type="masked_ratio", entropy_coef=0.1), capacity=capacity)


@settings(max_examples=15)
@given(st.integers(0, 2**32 - 1))
def test_long_samples_of_any_lengths(models, monkeypatch, seed):
    """One row has few and many keys: suffixes do not attend to the padding of other prefixes' keys."""
    monkeypatch.setattr("buckeye.trainer.data.packing.SHORT_KEYS", 24)
    monkeypatch.setattr("buckeye.trainer.model.attention.SHORT_KEYS", 24)
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(rng.integers(2, 5)):
        prompt = rng.integers(0, 40, rng.integers(5, 25))
        for _ in range(rng.integers(2, 4)):
            ids = np.concatenate([prompt, rng.integers(0, 40, rng.integers(1, 20))]).astype(np.int32)
            samples.append((ids, np.arange(len(ids)) >= len(prompt)))
    _compare(models, samples, _loss(type="masked_ratio"), capacity=400)


@pytest.mark.parametrize("kind", sorted(LOSS_TYPES))
def test_every_loss(models, kind, monkeypatch):
    monkeypatch.setattr(head, "_CHUNK_BYTES", 4 * 40 * 5)  # chunks of five tokens
    rng = np.random.default_rng(3)
    prompt = rng.integers(0, 40, 7)
    samples = []
    for length in (1, 9, 30, 9):
        ids = np.concatenate([prompt, rng.integers(0, 40, length)]).astype(np.int32)
        samples.append((ids, np.arange(len(ids)) >= 7))
    _compare(models, samples, _loss(type=kind, kl_coef=0.1, entropy_coef=0.05), capacity=100)
