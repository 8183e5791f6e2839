"""Arguments for CUDA's variable-length attention, checked with a version of it for any device."""

import itertools

import numpy as np
import pytest
import torch
from transformers import Qwen3Config

from buckeye.trainer.data.packing import pack_micro_batch
from buckeye.trainer.model import attention
from buckeye.trainer.model.attention import packed_attention
from buckeye.trainer.model.policy import load_policy
from tests.devices import DEVICES, atomic_sums

CPU = torch.device("cpu")
PROMPT = np.random.default_rng(0).integers(0, 256, 20).astype(np.int32)


def varlen_attn(
    query,
    key,
    value,
    query_ends,
    key_ends,
    longest_query,
    longest_key,
    *,
    scale,
    window_size,
    enable_gqa=False,
):
    """Compute attention as torch documents it: a sequence's last query aligns with its last key."""
    assert query_ends.dtype == key_ends.dtype == torch.int32
    assert len(query_ends) == len(key_ends)
    assert (query_ends[0], key_ends[0]) == (0, 0)
    assert (int(query_ends[-1]), int(key_ends[-1])) == (len(query), len(key))
    assert int(query_ends.diff().max()) == longest_query
    assert int(key_ends.diff().max()) == longest_key
    assert enable_gqa == (query.shape[1] != key.shape[1])
    before, after = window_size
    assert after == 0
    outputs = []
    pairs = zip(itertools.pairwise(query_ends.tolist()), itertools.pairwise(key_ends.tolist()), strict=True)
    for (first_query, end_query), (first_key, end_key) in pairs:
        own, keys, values = query[first_query:end_query], key[first_key:end_key], value[first_key:end_key]
        keys, values = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (keys, values))
        position = torch.arange(len(own))[:, None] + len(keys) - len(own)
        distance = position - torch.arange(len(keys))
        hidden = (distance < 0) | (distance > before if before >= 0 else False)
        hidden = torch.as_tensor(hidden).to(own.device)
        scores = torch.einsum("qhd,khd->hqk", own, keys) * scale
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(outputs)


SAMPLES = {
    "one": [9],
    "several": [2, 30, 1, 29, 28],
    "a group": [9, 30, 30],
    "two groups and one alone": [9, 30, 11, 12, 40],
}


def row_of(name: str, lengths: list[int], device: torch.device = CPU):
    draw = np.random.default_rng(1)
    samples = [draw.integers(0, 256, n).astype(np.int32) for n in lengths]
    if "group" in name:
        samples = [np.concatenate([PROMPT, ids]) for ids in samples]
    if "two" in name:
        samples[2:4] = [np.concatenate([PROMPT[::-1], ids]) for ids in samples[2:4]]
    return pack_micro_batch(samples, [np.arange(len(ids)) >= 1 for ids in samples], device)


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("window", [None, 4, 25])
def test_varlen_attention_equals_padded_attention(build_model, monkeypatch, name, window):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    sliding = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}
    directory = build_model(Qwen3Config, **(sliding if window else {}))
    row = row_of(name, SAMPLES[name])
    results = []
    for flash in (True, False):
        policy = load_policy(str(directory), CPU)
        policy.flash = flash
        logprobs, entropies = policy(row, torch.ones(len(row.targets)))
        (logprobs.sum() + entropies.sum()).backward()
        results.append([logprobs, entropies, *(p.grad for p in policy.trainable.values())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("flash", [True, False])
def test_gradient_of_a_shared_prefix_is_exact_and_repeatable(build_model, monkeypatch, device, flash):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    torch.__future__.set_swap_module_params_on_conversion(True)
    atomic_sums.clear()
    directory, name = str(build_model(Qwen3Config)), "two groups and one alone"
    found = []
    for where in ("cpu", device, device):
        place = torch.zeros(0, device=where).device
        policy = load_policy(directory, place, compute_dtype="float32")
        policy.flash = flash
        policy.model.bfloat16()  # the pretended device has no autocast
        row = row_of(name, SAMPLES[name], place)
        logprobs, _ = policy(row, torch.ones(len(row.targets), device=place))
        logprobs.sum().backward()
        found.append([p.grad.cpu() for p in policy.trainable.values()])
    torch.__future__.set_swap_module_params_on_conversion(False)
    assert atomic_sums == []
    for expected, first, second in zip(*found, strict=True):
        assert torch.equal(first, second)
        assert (first - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("window", [None, 4])
def test_torch_accepts_the_varlen_arguments(window):
    layout = row_of("a group", SAMPLES["a group"], device=torch.device("meta")).layout
    tokens = int(layout.blocks[-1].end)
    query = torch.empty(1, 4, tokens, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    key, value = (torch.empty_like(query[:, :2]).requires_grad_() for _ in range(2))
    output, _ = packed_attention(
        torch.nn.Module(), query, key, value, None, layout=layout, flash=True, sliding_window=window
    )
    output.sum().backward()
    assert output.shape == (1, tokens, 4, 64)
    assert query.grad.shape == query.shape
    assert key.grad.shape == value.grad.shape == key.shape


@pytest.mark.parametrize(
    ("gpu", "flash", "words"), [(False, False, "SDPA"), (True, True, "flash"), (True, False, "SDPA")]
)
def test_detect_attention(monkeypatch, gpu, flash, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(attention, "flash_available", lambda device: flash)
    assert attention.detect_attention().startswith(words)
