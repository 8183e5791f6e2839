"""Projections: packed and plain matrices give the same product."""

import weakref

import pytest
import torch

from buckeye.inference.engine import weights as weights_module
from buckeye.inference.engine.architecture import read_spec
from buckeye.inference.engine.projection import Projection, padded_rows
from buckeye.inference.engine.weights import Checkpoint, DecoderWeights, PartialUpdateError

from .conftest import make_engine


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("shape", [(24, 16), (1024, 512)])
@pytest.mark.parametrize("biased", [False, True])
def test_a_projection_is_the_product_with_the_transposed_weight(dtype, error, shape, biased):
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(shape, generator=generator) * shape[1] ** -0.5).to(dtype)
    bias = torch.randn(shape[0], generator=generator).to(dtype) if biased else None
    projection = Projection(weight.clone(), bias)
    for rows in (1, 2, 16, 17, 129):
        x = torch.randn(rows, shape[1], generator=generator).to(dtype)
        exact = x.double() @ weight.double().T
        if bias is not None:
            exact += bias.double()
        made = projection(x)
        assert made.dtype is dtype
        torch.testing.assert_close(made.double(), exact, atol=error, rtol=error)


def test_padded_row_counts_are_few():
    assert [padded_rows(rows) for rows in (1, 15, 16, 17, 18, 33, 128, 129)] == [
        1,
        15,
        16,
        18,
        18,
        36,
        128,
        144,
    ]
    sizes = {rows: padded_rows(rows) for rows in range(1, 8193)}
    assert all(rows <= padded <= 1.125 * rows for rows, padded in sizes.items())
    assert len(set(sizes.values())) == 16 + 8 * 9


def test_prepared_weights_are_unused_before_load(make_model):
    old, new = make_model("qwen3"), make_model("qwen3", seed=1)
    weights = DecoderWeights(read_spec(old.directory), dtype=torch.float32, device=torch.device("cpu"))
    weights.load(Checkpoint(old.directory))
    prepared = weights.prepare(Checkpoint(new.directory))
    embedding = {m.directory: m.reference.get_input_embeddings().weight for m in (old, new)}
    assert torch.equal(weights.current.embed, embedding[old.directory])
    weights.load(prepared)
    assert torch.equal(weights.current.embed, embedding[new.directory])


def test_loaded_weights_do_not_change_with_their_file(make_model, tmp_path):
    model = make_model("qwen3")
    model.reference.save_pretrained(tmp_path)
    weights = DecoderWeights(read_spec(tmp_path), dtype=torch.float32, device=torch.device("cpu"))
    weights.load(Checkpoint(tmp_path))
    before = weights.current.embed.clone()
    file = tmp_path / "model.safetensors"
    with file.open("r+b") as written:
        start = 8 + int.from_bytes(written.read(8), "little")  # the tensors start after the header
        written.seek(start)
        written.write(b"\x7f" * (file.stat().st_size - start))
    assert torch.equal(weights.current.embed, before)


@pytest.fixture
def in_use(make_model, monkeypatch):
    """Loaded weights that count as large, and a checkpoint of other weights."""
    monkeypatch.setattr(weights_module, "_MAX_SECOND_SET_BYTES", 0)
    old, new = make_model("qwen3"), make_model("qwen3", seed=1)
    weights = DecoderWeights(read_spec(old.directory), dtype=torch.float32, device=torch.device("cpu"))
    weights.load(Checkpoint(old.directory))
    return weights, Checkpoint(new.directory)


def test_large_weights_are_released_before_others_are_read(in_use, monkeypatch):
    weights, new = in_use
    assert weights.prepare(new) is new
    x = torch.ones(1, weights.current.embed.shape[1])
    before, embed = [layer.gate_up(x) for layer in weights.current.layers], weakref.ref(weights.current.embed)
    old, alive = [weakref.ref(layer.gate_up) for layer in weights.current.layers], []
    read = Checkpoint.tensor
    monkeypatch.setattr(
        Checkpoint, "tensor", lambda *a: alive.append(sum(o() is not None for o in old)) or read(*a)
    )
    weights.load(new)
    assert embed() is None
    assert not any(alive)
    whole = DecoderWeights(read_spec(new.directory), dtype=torch.float32, device=torch.device("cpu"))
    monkeypatch.setattr(weights_module, "_MAX_SECOND_SET_BYTES", 2**28)
    whole.load(whole.prepare(new))
    for layer, other, was in zip(weights.current.layers, whole.current.layers, before, strict=True):
        assert torch.equal(layer.gate_up(x), other.gate_up(x))
        assert not torch.equal(layer.gate_up(x), was)
    assert torch.equal(weights.current.head(x), whole.current.head(x))
    assert torch.equal(weights.current.embed, whole.current.embed)


def test_partial_update_ends_the_engine(in_use, monkeypatch, make_model, refusal):
    _, new = in_use
    engine = make_engine(make_model("qwen3").directory)
    read = Checkpoint.tensor

    def tensor(checkpoint, name):
        if name.startswith("model.layers.1."):
            raise OSError("the disk is gone")
        return read(checkpoint, name)

    monkeypatch.setattr(Checkpoint, "tensor", tensor)
    done = engine.install_weights(engine.decoder.weights.prepare(new), 1)
    with refusal(PartialUpdateError):
        engine.run()
    assert isinstance(done.exception(), PartialUpdateError)
