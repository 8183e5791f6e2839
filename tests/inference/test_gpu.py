"""The engine on a GPU computes what it computes on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from buckeye.inference.architecture import read_spec
from buckeye.inference.cache import KVCache
from buckeye.inference.decoder import Chunk, Decoder
from buckeye.inference.engine import Engine
from buckeye.inference.sequences import Sequence
from buckeye.inference.types import SamplingParams
from buckeye.inference.weights import Checkpoint, Weights

from .conftest import MAX_LEN, VOCAB, finish, make_engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
DEVICE = torch.device("cuda")


def make_decoder(directory: Path, dtype: torch.dtype) -> Decoder:
    spec = read_spec(directory)
    weights = Weights(spec, dtype=dtype, device=DEVICE)
    weights.load(Checkpoint(directory))
    return Decoder(spec, weights, KVCache(spec, slots=8, max_len=MAX_LEN, dtype=dtype, device=DEVICE))


def token_ids(count: int, seed: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_sampled_tokens_are_those_of_a_cpu(make_model, family):
    directory = make_model(family).directory

    def sequences() -> list[Sequence]:
        settings = [SamplingParams(max_tokens=30, seed=i, top_p=0.9 if i % 2 else 1.0) for i in range(4)]
        return [Sequence(tuple(token_ids(9 * i + 1, i).tolist()), p) for i, p in enumerate(settings)]

    on_cpu, on_gpu = sequences(), sequences()
    finish(make_engine(directory), *on_cpu)
    finish(Engine(make_decoder(directory, torch.float32)), *on_gpu)
    for cpu, gpu in zip(on_cpu, on_gpu, strict=True):
        assert gpu.token_ids == cpu.token_ids
        assert gpu.logprobs == pytest.approx(cpu.logprobs, abs=1e-3)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_a_prompt_in_parts_gives_the_same_keys_and_values(make_model, dtype, tolerance):
    decoder = make_decoder(make_model("qwen3").directory, dtype)
    ids = token_ids(50, 0)
    with torch.inference_mode():
        decoder.prefill([Chunk(0, ids), Chunk(1, ids[:20])])
        decoder.prefill([Chunk(1, ids[20:], 20)])
    whole, parts = (decoder.cache.kv[:, slot, :, :50].float() for slot in (0, 1))
    assert float(whole.abs().max()) > 0.5
    torch.testing.assert_close(parts, whole, rtol=tolerance, atol=tolerance)
