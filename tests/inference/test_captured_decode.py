"""Decoding in one captured launch, compared with the decoder that runs operation by operation.

On a CPU, Triton's interpreter computes the kernels; graphs are not captured there.
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F

from buckeye.inference.engine import projection
from buckeye.inference.engine.decoder import Chunk
from buckeye.inference.engine.weights import copy_over
from tests.inference.conftest import make_engine, sample


@pytest.fixture
def decoder(qwen3):
    return make_engine(qwen3.directory, slots=4).decoder


@pytest.mark.parametrize("error", [0.0, 0.01])
def test_captured_step_with_equal_logits_is_used(decoder, error):
    step = _Step(decoder, error)
    assert decoder._difference(step) == pytest.approx(error, abs=1e-3)
    assert not decoder.cache.kv.any()


def test_wrong_or_failing_captured_step_is_not_used(decoder, monkeypatch, caplog):
    module = pytest.importorskip("buckeye.inference.engine.captured_decode", exc_type=ImportError)
    for wrong in (1.0, float("nan"), RuntimeError("no compiler")):
        monkeypatch.setattr(module, "CapturedDecode", lambda *_, wrong=wrong: _Step(decoder, wrong))
        assert decoder._captured_decode() is None
    assert len(caplog.records) == 3


def test_decoding_works_without_triton(decoder, monkeypatch, caplog):
    monkeypatch.setitem(__import__("sys").modules, "buckeye.inference.engine.captured_decode", None)
    assert decoder._captured_decode() is None
    assert len(caplog.records) == 1


def test_captured_step_that_fails_later_is_replaced(qwen3, caplog):
    engine, other = make_engine(qwen3.directory), make_engine(qwen3.directory)
    engine.decoder._captured = _Step(engine.decoder, RuntimeError("out of memory"))
    one, same = sample(max_tokens=5), sample(max_tokens=5)
    for each, sequence in ((engine, one), (other, same)):
        each.submit([sequence])
        while each.step():
            pass
    assert one.token_ids == same.token_ids
    assert len(caplog.records) == 1


class _Step:
    def __init__(self, decoder, wrong) -> None:
        self.decoder, self.wrong = decoder, wrong

    def __call__(self, tokens, positions):
        if isinstance(self.wrong, Exception):
            raise self.wrong
        logits = self.decoder._decode(tokens, positions, int(positions.max()) + 1)
        return logits * (1 + self.wrong)


@pytest.fixture
def plain(monkeypatch):
    """Keep matrices in the plain layout, as on a GPU, instead of oneDNN's."""
    monkeypatch.setattr(projection, "_packs", lambda _: False)


def test_copy_over_writes_in_place(make_model, plain):
    ours, theirs = (
        make_engine(make_model("qwen3").directory),
        make_engine(make_model("qwen3", seed=1).directory),
    )
    old, new = ours.decoder.weights.current, theirs.decoder.weights.current
    places = [tensor.data_ptr() for tensor in old.tensors]
    assert copy_over(old, new)
    assert [tensor.data_ptr() for tensor in old.tensors] == places
    for engine in (ours, theirs):
        engine.submit([one := sample(max_tokens=5)])
        while engine.step():
            pass
        engine.tokens = one.token_ids
    assert ours.tokens == theirs.tokens


def test_copy_over_rejects_other_shapes(make_model, plain):
    one, other = (make_engine(make_model(f).directory).decoder.weights.current for f in ("qwen3", "llama"))
    before = [tensor.clone() for tensor in one.tensors]
    assert not copy_over(one, other)
    assert all(map(torch.equal, one.tensors, before))


# --- the kernels ---


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def kernels():
    """Decode kernels on a GPU or in Triton's interpreter, which must be enabled before Triton is imported."""
    if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs a GPU, or Triton, NumPy before 2.3 and TRITON_INTERPRET=1")
    torch.set_default_device(DEVICE)
    yield pytest.importorskip("buckeye.inference.engine.decode_kernels")
    torch.set_default_device(None)


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [1, 3, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("heads", "key_values", "dim", "positions"), [(4, 2, 32, 70), (6, 2, 80, 300), (2, 1, 64, 900)]
)
def test_attention_kernel_equals_pytorch(
    kernels, monkeypatch, parts, dtype, heads, key_values, dim, positions
):
    monkeypatch.setattr(kernels, "_parts", lambda *_: parts)
    kv = torch.randn(5, 2 * key_values, positions, dim, dtype=dtype)
    queries = torch.randn(3, heads, dim, dtype=dtype)
    at = torch.tensor([positions - 1, 5, -1])
    found = kernels.attend(queries, kv, at).view(3, heads, dim).float()
    for row, last in enumerate(at[:2]):
        keys, values = kv[row, :, : last + 1].float().chunk(2)
        expected = F.scaled_dot_product_attention(
            queries[row, :, None].float(), keys, values, enable_gqa=True
        )
        torch.testing.assert_close(found[row], expected[:, 0], atol=_error(dtype), rtol=_error(dtype))
    assert not found[2].any()


@pytest.mark.gpu
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_queries_and_keys_are_rotated_and_keys_and_values_stored(kernels, dtype, normed):
    heads, key_values, dim, positions = 4, 2, 80, 30
    kv = torch.randn(4, 2 * key_values, positions, dim, dtype=dtype)
    expected = kv.clone()
    qkv = torch.randn(3, (heads + 2 * key_values) * dim, dtype=dtype)
    weight = torch.randn(heads + key_values, dim, dtype=dtype) if normed else None
    cos, sin = torch.randn(2, positions, dim, dtype=dtype)
    at = torch.tensor([29, 0, -1])
    queries = kernels.rotate_and_store(qkv, weight, (cos, sin), at, kv, heads=heads, epsilon=1e-6)
    rows = qkv.view(3, -1, dim).float()
    rotated = rows[:, : heads + key_values]
    if weight is not None:
        rotated = F.rms_norm(rotated, (dim,), None, 1e-6) * weight.float()
    angles = (table[at.clamp(min=0)][:, None].float() for table in (cos, sin))
    rotated = rotated * next(angles) + rotated.roll(dim // 2, -1) * next(angles)
    for row, place in enumerate(at[:2]):
        expected[row, :, place] = torch.cat([rotated[row, heads:], rows[row, heads + key_values :]]).to(dtype)
    torch.testing.assert_close(queries.float(), rotated[:, :heads], atol=_error(dtype), rtol=_error(dtype))
    torch.testing.assert_close(kv, expected, atol=_error(dtype), rtol=_error(dtype))


@pytest.mark.gpu
def test_a_whole_step_equals_the_decoder(kernels, make_model):
    from buckeye.inference.engine.captured_decode import decode_step

    for family in ("qwen3", "qwen2", "llama"):
        ours, theirs = (
            make_engine(make_model(family).directory, slots=4, device=DEVICE).decoder for _ in range(2)
        )
        with torch.inference_mode():
            for decoder in (ours, theirs):
                decoder.prefill(
                    [Chunk(0, torch.arange(5, 15)), Chunk(1, torch.arange(3)), Chunk(2, torch.arange(40))]
                )
            tokens, positions = torch.tensor([7, 8, 9, 0]), torch.tensor([10, 3, 40, -1])
            tables = (ours._cos, ours._sin)
            found = decode_step(
                ours.spec, ours.weights.current, ours.cache.kv.unbind(0), tables, tokens, positions
            )
            expected = theirs._decode(tokens[:3], positions[:3], 41)
        torch.testing.assert_close(found[:3], expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(ours.cache.kv, theirs.cache.kv, atol=1e-5, rtol=1e-4)


def _error(dtype: torch.dtype) -> float:
    return 1e-5 if dtype is torch.float32 else 2e-2
