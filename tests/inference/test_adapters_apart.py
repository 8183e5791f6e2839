"""16-bit weights keep an adapter separate, however little it adds to each weight."""

import copy

import pytest
import torch

from buckeye.inference.engine.adapters import AdaptedCheckpoint
from buckeye.inference.engine.architecture import read_spec
from buckeye.inference.engine.decoder import Chunk, Decoder
from buckeye.inference.engine.kv_cache import KVCache
from buckeye.inference.engine.weights import Checkpoint, DecoderWeights

from .conftest import MAX_LEN, VOCAB, build_model

EVERY_MATRIX = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CPU = torch.device("cpu")
PROMPTS = torch.randint(VOCAB, (64, 12), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module", params=["qwen3", "llama"])  # with a tied and with an untied head
def base(request, tmp_path_factory):
    """Model whose weights are exact in bfloat16, and its directory."""
    model, directory = build_model(request.param, seed=3), tmp_path_factory.mktemp(request.param)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    model.save_pretrained(directory)
    return model, directory


def adapt(model, directory, *, size, seed=0, **settings):
    """Save an adapter that adds about `size` to each weight of its matrices; return the adapted model."""
    from peft import LoraConfig, get_peft_model

    settings = {"r": 4, "lora_alpha": 4, "target_modules": EVERY_MATRIX} | settings
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(task_type="CAUSAL_LM", **settings))
    torch.manual_seed(seed)
    for name, parameter in adapted.named_parameters():
        if "lora_A" in name:
            torch.nn.init.normal_(parameter, 0.0, 0.5)
        elif "lora_B" in name:
            torch.nn.init.normal_(parameter, 0.0, size)
        elif parameter.requires_grad:
            parameter.data += 0.05 * torch.randn_like(parameter)
    adapted.save_pretrained(directory)
    return adapted.eval()


def weights_of(directory, checkpoint, dtype):
    weights = DecoderWeights(read_spec(directory), dtype=dtype, device=CPU)
    weights.check(checkpoint)
    weights.load(checkpoint)
    return weights


def logits(weights, directory, dtype):
    """Return the logits of the token after each prompt, float32 [prompts, vocab]."""
    spec, (count, length) = read_spec(directory), PROMPTS.shape
    cache = KVCache(spec, slots=count, max_len=MAX_LEN, dtype=dtype, device=CPU)
    decoder = Decoder(spec, weights, cache)
    decoder.prefill([Chunk(slot, ids[:-1]) for slot, ids in enumerate(PROMPTS)])
    return decoder.decode(PROMPTS[:, -1], torch.full((count,), length - 1), length)


@torch.no_grad()
def expected(model):
    return model(PROMPTS).logits[:, -1]


def share_that_arrives(before, after, base, adapted):
    """Return the fraction of the adapter's float32 change of the logits that the computed change contains."""
    wanted = expected(adapted) - expected(base)
    return float(((after - before) * wanted).sum() / wanted.square().sum())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_adapter_below_bfloat16_resolution_changes_the_result(base, tmp_path, dtype):
    model, directory = base
    adapted = adapt(model, tmp_path, size=2e-4)  # bfloat16 numbers near 0.2 are 1e-3 apart
    checkpoint = AdaptedCheckpoint(directory, tmp_path)
    before = logits(weights_of(directory, Checkpoint(directory), dtype), directory, dtype)
    after = logits(weights_of(directory, checkpoint, dtype), directory, dtype)
    assert 0.7 < share_that_arrives(before, after, model, adapted) < 1.3
    if dtype is torch.bfloat16:
        plain = Checkpoint(directory)
        changed = [checkpoint.merged(name).to(dtype) != plain.tensor(name) for name in checkpoint.low_rank]
        share = torch.cat([of_one.flatten() for of_one in changed]).float().mean()
        assert share < 0.5  # most of the change would be lost if it were added to the weights


def test_fully_trained_modules_replace_those_of_the_base(base, tmp_path):
    model, directory = base
    adapted = adapt(
        model, tmp_path, size=0.02, target_modules=["q_proj", "down_proj"], modules_to_save=["k_proj", "norm"]
    )
    weights = weights_of(directory, AdaptedCheckpoint(directory, tmp_path), torch.bfloat16)
    found, wanted = logits(weights, directory, torch.bfloat16), expected(adapted)
    assert (found - wanted).abs().mean() < 0.1 * (wanted - expected(model)).abs().mean()


def test_second_adapter_replaces_the_first(base, tmp_path):
    model, directory = base
    for seed in (1, 2):
        adapt(model, tmp_path / str(seed), size=0.02, seed=seed)
    weights = weights_of(directory, Checkpoint(directory), torch.bfloat16)
    at_first, embedding = logits(weights, directory, torch.bfloat16), weights.current.embed
    weights.load(AdaptedCheckpoint(directory, tmp_path / "1"))
    weights.load(AdaptedCheckpoint(directory, tmp_path / "2"))
    assert weights.current.embed is embedding  # one model in memory, not two
    second = logits(weights, directory, torch.bfloat16)
    alone = weights_of(directory, AdaptedCheckpoint(directory, tmp_path / "2"), torch.bfloat16)
    assert torch.equal(second, logits(alone, directory, torch.bfloat16))
    assert not torch.equal(second, at_first)
    weights.load(Checkpoint(directory))
    assert torch.equal(logits(weights, directory, torch.bfloat16), at_first)


def test_adapter_after_a_weight_update_applies_to_its_base(base, make_model, tmp_path):
    model, directory = base
    adapt(model, tmp_path, size=0.02)
    weights = weights_of(directory, Checkpoint(directory), torch.bfloat16)
    family = "qwen3" if read_spec(directory).qk_norm else "llama"
    weights.load(Checkpoint(make_model(family, seed=8).directory))
    weights.load(AdaptedCheckpoint(directory, tmp_path))
    alone = weights_of(directory, AdaptedCheckpoint(directory, tmp_path), torch.bfloat16)
    assert torch.equal(logits(weights, directory, torch.bfloat16), logits(alone, directory, torch.bfloat16))
