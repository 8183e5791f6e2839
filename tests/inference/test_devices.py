"""The engine computes the same values on other devices as on a CPU."""

import pytest
import torch

from buckeye.inference.engine.decoder import Chunk
from buckeye.inference.engine.kv_cache import cache_budget
from buckeye.inference.engine.sequences import Sequence
from buckeye.inference.engine.weights import Checkpoint
from buckeye.inference.types import SamplingParams
from tests.devices import DEVICES

from .conftest import VOCAB, finish, make_engine


def token_ids(count: int, seed: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


SETTINGS = [
    {},
    {"top_p": 0.9},
    {"temperature": 0.0},
    {"top_k": 20, "temperature": 0.7},
    {"min_tokens": 20, "stop_token_ids": (5, 6, 7), "top_logprobs": 3},
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "family", ["qwen3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2", "llama"))]
)
def test_sampled_tokens_are_those_of_a_cpu(make_model, family, device):
    directory = make_model(family).directory

    def sequences() -> list[Sequence]:
        settings = [SamplingParams(max_tokens=30, seed=i, **SETTINGS[i]) for i in range(len(SETTINGS))]
        return [Sequence(tuple(token_ids(9 * i + 1, i).tolist()), p) for i, p in enumerate(settings)]

    on_cpu, elsewhere = sequences(), sequences()
    finish(make_engine(directory), *on_cpu)
    finish(make_engine(directory, spare=2, device=device), *elsewhere)
    for cpu, other in zip(on_cpu, elsewhere, strict=True):
        assert other.token_ids == cpu.token_ids
        assert other.logprobs == pytest.approx(cpu.logprobs, abs=1e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_shared_prompts_and_weight_update_equal_the_cpu(make_model, device):
    old, new = (make_model("qwen3", seed).directory for seed in (0, 1))
    prompt = tuple(token_ids(40, 0).tolist())
    results = []
    for engine in (make_engine(old), make_engine(old, spare=2, device=device)):
        sequences = [Sequence(prompt, SamplingParams(max_tokens=8 + i, seed=i)) for i in range(4)]
        engine.submit(sequences)
        for _ in range(4):
            engine.step()
        engine.pause("keep")
        updated = engine.install_weights(Checkpoint(new), 1)
        engine.resume()
        while engine.step():
            pass
        updated.result(timeout=0)
        longer = Sequence((*prompt, *sequences[0].token_ids), SamplingParams(max_tokens=5, seed=9))
        finish(engine, longer)
        results.append([(s.token_ids, s.error) for s in (*sequences, longer)])
    assert results[0] == results[1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_a_prompt_in_parts_gives_the_same_keys_and_values(make_model, dtype, tolerance, device):
    decoder = make_engine(make_model("qwen3").directory, dtype=dtype, device=device).decoder
    ids = token_ids(50, 0)
    with torch.inference_mode():
        decoder.prefill([Chunk(0, ids), Chunk(1, ids[:20])])
        decoder.prefill([Chunk(1, ids[20:], 20)])
    whole, parts = (decoder.cache.kv[:, slot, :, :50].float().cpu() for slot in (0, 1))
    assert float(whole.abs().max()) > 0.5
    torch.testing.assert_close(parts, whole, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("free", "share", "budget"),
    [
        # a share of 80 GB, minus the weights, a second model, four times the logits and two gigabytes
        (80, 0.5, 40 * 10**9 - 4 * 10**9 - 4 * 10**8 - 2**31),
        (30, 0.9, 30 * 10**9 - 2 * 10**9 - 4 * 10**8 - 2**31),
        (42, 0.05, 10 * 10**9),  # a quarter of the memory left by a second model
        (1, 0.9, 0),
    ],
)
def test_cache_budget_is_the_rest_of_the_gpu_share(monkeypatch, free, share, budget):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free * 10**9, 80 * 10**9))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 2 * 10**9)
    assert cache_budget(torch.device("cuda", 0), gpu_share=share, logits=10**8) == budget
