"""Rounding of float32 weights for storage: unbiased in the mean, and no silent overflow."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from buckeye.config.trainer import TrainerConfig
from buckeye.errors import RunError, UsageError
from buckeye.trainer.batch_loss import BatchLoss
from buckeye.trainer.learner import Learner
from buckeye.trainer.output.weight_rounding import empty_published, round_stochastically, round_tensor
from buckeye.trainer.output.writer import OutputWriter
from buckeye.transport.weights import read_weights_manifest


def rounded(values, seed=0):
    return round_stochastically(torch.tensor(values), torch.Generator().manual_seed(seed))


@given(st.floats(width=32), st.integers(0, 2**32))
def test_stochastic_rounding_gives_one_of_two_neighbors(value, seed):
    x = torch.tensor([value])
    [found] = rounded([value], seed).tolist()
    if not math.isfinite(value):
        assert repr(found) == repr(value)
        return
    bits = x.view(torch.int32) >> 16 << 16
    toward_zero = bits.view(torch.float32).item()
    away = (bits + (1 << 16)).view(torch.float32).item()
    assert found in {toward_zero, away}
    assert math.isfinite(found)
    if toward_zero == x.item():
        assert found == toward_zero  # also with the sign of a zero
        assert math.copysign(1, found) == math.copysign(1, value)


def test_stochastic_rounding_is_unbiased():
    # Between 1 and 1 + 2^-7: the mean of 40,000 draws has a standard deviation of 2^-7 * sqrt(p (1 - p) /
    # 40000)
    for part in (0.0, 0.01, 0.3, 0.5, 0.95):
        for sign in (1.0, -1.0):
            value = sign * (1.0 + part * 2**-7)
            mean = rounded([value] * 40_000).double().mean().item()
            assert abs(mean - value) <= 4.5 * 2**-7 * math.sqrt(part * (1 - part) / 40_000) + 1e-7


def published(name, values, dtype, seed=None):
    return round_tensor(name, values, seed=seed, out=empty_published(values, dtype, values.device))


def test_random_bits_depend_only_on_seed_and_name():
    x = torch.randn(64, 64)
    once = published("a", x, torch.bfloat16, seed=3)
    assert torch.equal(once, published("a", x + 0, torch.bfloat16, seed=3))
    assert not torch.equal(once, published("b", x, torch.bfloat16, seed=3))
    assert not torch.equal(once, published("a", x, torch.bfloat16, seed=4))


def test_weight_beyond_float16_is_refused(refusal):
    with refusal(RunError):
        published("w", torch.tensor([1.0, -7e4]), torch.float16)
    assert published("w", torch.tensor([1.0, math.inf]), torch.float16).tolist() == [1.0, math.inf]


@pytest.mark.parametrize(
    ("weights", "lora", "named"),
    [
        ({"rounding": "stochastic", "dtype": "float16"}, None, "float16"),
        ({"rounding": "stochastic"}, {}, "adapter"),
        ({"dtype": "bfloat16"}, {}, "adapter"),
    ],
)
def test_conflicting_weight_settings_are_refused(weights, lora, named):
    with pytest.raises((UsageError, ValueError), match=named):
        TrainerConfig(weights=weights, model={"experimental": {"lora": lora}})


@pytest.mark.parametrize(
    ("weights", "dtype"),
    [
        ({}, torch.float32),
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": "float16"}, torch.float16),
        ({"rounding": "stochastic"}, torch.bfloat16),
    ],
)
def test_trainer_publishes_in_the_configured_dtype(tmp_path, train, batches, weights, dtype):
    train(tmp_path, batches[:1], weights=weights)
    directory = tmp_path / "weights" / "step_1"
    tensors = load_file(directory / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {dtype}
    name = str(dtype).removeprefix("torch.")
    manifest = read_weights_manifest(directory)
    assert (manifest.dtype, manifest.canary.dtype) == (name, name)
    assert json.loads((directory / "config.json").read_text())["dtype"] == name


@pytest.mark.parametrize(
    ("compute", "weights", "same"),
    [
        ("bfloat16", {}, True),  # auto, on a CPU
        ("float32", {"rounding": "stochastic"}, True),
        ("bfloat16", {"rounding": "nearest"}, False),
    ],
)
def test_training_step_uses_the_published_weights(
    tmp_path, train, batches, monkeypatch, compute, weights, same
):
    """The step then updates the trained weights, which are exact."""
    equal, exact, backward = [], [], BatchLoss.backward

    def compared(self, *args):
        trained = self._learner.policy.trainable
        newest = max((tmp_path / "weights").glob("step_*"), key=lambda path: path.stat().st_mtime_ns)
        stored = load_file(newest / "model.safetensors")
        pairs = [(stored[name].float(), parameter.detach()) for name, parameter in trained.items()]
        assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
        equal.append(all(torch.equal(*pair) for pair in pairs))
        return backward(self, *args)

    def stepped(self, *args, **kwargs):
        parameters = self.policy.trainable.values()
        exact.append(any(not torch.equal(p, p.to(torch.bfloat16).float()) for p in parameters))
        return update(self, *args, **kwargs)

    def published(self, **kwargs):
        values = publish(self, **kwargs)
        self.wait_published()
        return values

    update, publish = Learner.apply_gradient, OutputWriter.publish
    monkeypatch.setattr(OutputWriter, "publish", published)
    monkeypatch.setattr(BatchLoss, "backward", compared)
    monkeypatch.setattr(Learner, "apply_gradient", stepped)
    model = {"compute_dtype": compute}
    train(tmp_path, batches[:3], weights=weights, model=model)
    assert equal == [same] * 3
    assert exact == [True] * 3


def test_weights_are_rounded_once_for_a_version_and_its_training_step(tmp_path, train, batches, monkeypatch):
    names = []

    def counted(name, *args, **kwargs):
        names.append(name)
        return round_tensor(name, *args, **kwargs)

    monkeypatch.setattr("buckeye.trainer.output.writer.round_tensor", counted)
    train(tmp_path, batches[:4], weights={"measure_interval": 1}, model={"compute_dtype": "bfloat16"})
    # Versions 0 to 4; the first step, because version 0 does not stay in memory; the policy change after
    # the steps 0, 1 and 3.
    assert len(names) == (5 + 1 + 3) * len(set(names))
