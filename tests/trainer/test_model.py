"""Packed forward passes equal plain ones, sample by sample."""

import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config

from buckeye.errors import UsageError
from buckeye.trainer.data.packing import pack_micro_batch
from buckeye.trainer.model.logprobs import token_logprobs
from buckeye.trainer.model.policy import load_policy, pick_device
from tests.rounding import logprob_error
from tests.trainer.counting import count_passes

CPU = torch.device("cpu")


@pytest.mark.parametrize("lengths", [[9], [5, 5, 5], [12, 10, 9, 4, 4, 3, 1], [2, 30, 1, 29, 28]])
def test_packed_equals_per_sample(tiny_model, lengths):
    policy = load_policy(str(tiny_model), CPU)
    plain = AutoModelForCausalLM.from_pretrained(tiny_model, attn_implementation="eager", dtype=torch.float32)
    torch.manual_seed(0)
    samples = [torch.randint(0, 256, (length,)) for length in lengths]
    hidden = policy.hidden_states(torch.cat(samples), lengths)
    packed = (hidden @ policy.head_weight.t()).log_softmax(-1)
    naive = torch.cat([plain(input_ids=ids[None]).logits[0].log_softmax(-1) for ids in samples])
    torch.testing.assert_close(packed, naive, rtol=0, atol=logprob_error(layers=2, width=48))
    packed[:, 3].sum().backward()
    naive[:, 3].sum().backward()
    for (name, ours), theirs in zip(policy.trainable.items(), plain.parameters(), strict=True):
        scale = theirs.grad.abs().max().item()
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-4 * scale + 1e-5, msg=name)


def test_padding_does_not_affect_real_tokens(tiny_model):
    policy = load_policy(str(tiny_model), CPU)
    ids = torch.randint(0, 256, (7,))
    alone = policy.hidden_states(ids, [7])
    other = policy.hidden_states(torch.cat([torch.randint(0, 256, (9,)), ids]), [9, 7])[9:]
    torch.testing.assert_close(alone, other, rtol=0, atol=logprob_error(layers=2, width=48))


def test_chunked_head_equals_model_logits(tiny_model):
    policy = load_policy(str(tiny_model), CPU)
    ids = torch.randint(0, 256, (9,))
    hidden = policy.hidden_states(ids, [9])[:-1]
    logprobs, _ = token_logprobs(hidden, policy.head_weight, ids[1:], torch.full((8,), 0.7))
    logits = policy.model(
        input_ids=ids[None], layout=pack_micro_batch([ids.int().numpy()], [np.zeros(9, bool)], CPU).layout
    ).logits[0, :-1]
    expected = (logits / 0.7).log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=logprob_error(layers=2, width=48))


def test_missing_model_is_refused(tmp_path, refusal):
    with refusal(UsageError):
        load_policy(str(tmp_path), CPU)


def test_incomplete_model_is_refused(tiny_model, tmp_path, refusal):
    copy = shutil.copytree(tiny_model, tmp_path / "m")
    tensors = load_file(copy / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"damaged: model\.norm\.weight: missing"):
        load_policy(str(copy), CPU)
    (copy / "model.safetensors").write_bytes(b"torn")
    with refusal(UsageError):
        load_policy(str(copy), CPU)


def _group(device):
    """Pack two samples with a common prompt and one without; all tokens after the fourth are trained."""
    torch.manual_seed(0)
    prompt = torch.randint(0, 256, (20,)).int()
    samples = [torch.cat([prompt, torch.randint(0, 256, (n,)).int()]).numpy() for n in (9, 30)]
    samples.append(torch.randint(0, 256, (17,)).int().numpy())
    return pack_micro_batch(samples, [np.arange(len(ids)) >= 4 for ids in samples], device)


def _logprobs_and_gradient(policy):
    row = _group(policy.device)
    logprobs, entropies = policy(row, torch.ones(len(row.targets), device=policy.device))
    (logprobs.sum() + entropies.sum()).backward()
    return logprobs.float(), policy.model.get_input_embeddings().weight.grad


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_flash_equals_padded_attention(build_model):
    directory = build_model(Qwen3Config, head_dim=64)
    device = torch.device("cuda", 0)
    results = [_logprobs_and_gradient(load_policy(str(directory), device, flash=f)) for f in (True, False)]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05 * other.abs().max().item())


def test_bfloat16_is_near_float32_and_weights_stay_float32(tiny_model):
    results = []
    for dtype in ("float32", "bfloat16"):
        policy = load_policy(str(tiny_model), CPU, compute_dtype=dtype)
        assert {p.dtype for p in policy.trainable.values()} == {torch.float32}
        logprobs, gradient = _logprobs_and_gradient(policy)
        assert gradient.dtype == torch.float32
        results.append((logprobs, gradient))
    (exact, gradient), (rounded, other) = results
    assert 1e-6 < (exact - rounded).abs().mean() < 0.05
    assert torch.nn.functional.cosine_similarity(gradient.flatten(), other.flatten(), dim=0) > 0.99


def test_the_head_sums_in_float32(tiny_model):
    policy = load_policy(str(tiny_model), CPU, compute_dtype="bfloat16")
    row = _group(CPU)
    temperatures = torch.ones(len(row.targets))
    expected = policy(row, temperatures)
    with policy.cast_weights():
        found = policy(row, temperatures)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, other)


def test_weights_are_cast_anew_after_a_step(tiny_model):
    policy = load_policy(str(tiny_model), CPU, compute_dtype="bfloat16")
    row = _group(CPU)
    ones = torch.ones(len(row.targets))
    outputs = []
    for _ in range(2):
        with policy.cast_weights(), torch.no_grad():
            outputs.append([policy(row, ones)[0] for _ in range(2)])
        with torch.no_grad():
            for parameter in policy.trainable.values():
                parameter.mul_(1.1)
    assert torch.equal(outputs[0][0], outputs[0][1])
    assert not torch.allclose(outputs[0][0], outputs[1][0], atol=1e-3)


def test_norms_equal_those_of_transformers(tiny_model):
    policy = load_policy(str(tiny_model), CPU)
    plain = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    upstream = torch.randn(3, 7, 32)
    results = []
    for model in (policy.model, plain):
        norm = model.model.norm
        norm.weight.data.copy_(torch.linspace(0.5, 2.0, 32))
        hidden = torch.linspace(-3, 2, 3 * 7 * 32).reshape(3, 7, 32).requires_grad_()
        norm(hidden).backward(upstream)
        results.append((hidden.grad, norm.weight.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to take")
def test_missing_gpu_is_refused():
    assert pick_device("auto").type == "cpu"
    with pytest.raises(UsageError, match="0 GPUs"):
        pick_device("cuda")


@pytest.mark.parametrize("every", [1, 2])
def test_checkpointed_activations_give_the_same_gradients(tiny_model, every):
    lengths, ids = [6, 4], torch.randint(0, 256, (10,))
    gradients, passes = [], []
    for checkpointed in (False, True):
        policy = load_policy(str(tiny_model), CPU)
        count = count_passes(policy)
        if checkpointed:
            policy.checkpoint_activations(every=every)
        policy.hidden_states(ids, lengths).square().sum().backward()
        gradients.append([p.grad for p in policy.trainable.values()])
        passes.append(count)
    layers = len(passes[0])
    assert sum(passes[0]) == layers
    assert sum(passes[1]) == layers + len(range(0, layers, every))
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(recomputed, plain, rtol=1e-5, atol=1e-6)
