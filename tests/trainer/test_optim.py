"""Schedules by hand; optimizers restore themselves exactly."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from buckeye.errors import CheckpointError
from buckeye.trainer.optim import build_optimizer, learning_rate


def _rates(**settings):
    return [learning_rate(step, peak=1.0, **settings) for step in range(8)]


def test_constant():
    assert _rates(schedule="constant", warmup=5, max_steps=8) == [1.0] * 8


def test_linear():
    rates = _rates(schedule="linear", warmup=2, decay=4, min_lr=0.2, max_steps=8)
    assert rates == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4])
    assert learning_rate(8, schedule="linear", peak=1.0, decay=4, min_lr=0.2, max_steps=8) == pytest.approx(
        0.2
    )


def test_linear_without_an_end_never_falls():
    assert _rates(schedule="linear", warmup=2, decay=4) == [0.5] + [1.0] * 7


def test_linear_with_a_decay_longer_than_the_run():
    rates = _rates(schedule="linear", warmup=2, decay=100, max_steps=8)
    assert rates == pytest.approx([0.5, 1.0, 1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])


def test_cosine():
    rates = _rates(schedule="cosine", warmup=0, min_lr=0.0, max_steps=8)
    assert rates[0] == 1.0
    assert rates[4] == pytest.approx(0.5)
    assert rates[2] == pytest.approx((1 + 2**-0.5) / 2)
    assert learning_rate(99, schedule="cosine", peak=1.0, min_lr=0.1, max_steps=8) == pytest.approx(0.1)


def _parameters():
    torch.manual_seed(0)
    shapes = {"embed.weight": (6, 4), "layer.weight": (4, 4), "layer.bias": (4,), "norm.weight": (4,)}
    return {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}


def _step(parameters, optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step(0.1)


@pytest.mark.parametrize("kind", ["adamw", "muon", "sgd"])
def test_state_survives_a_file_bit_for_bit(kind):
    def build(parameters):
        return build_optimizer(parameters, kind=kind, weight_decay=0.1, embeddings={"embed.weight"})

    straight = _parameters()
    optimizer = build(straight)
    assert optimizer.state() == {}
    for seed in range(2):
        _step(straight, optimizer, seed)
    stored = load(save(optimizer.state()))
    resumed = {name: nn.Parameter(p.detach().clone()) for name, p in straight.items()}
    other = build(dict(reversed(resumed.items())))  # the names count, not the order
    other.load_state(stored)
    for seed in range(2, 4):
        _step(straight, optimizer, seed)
        _step(resumed, other, seed)
    for name in straight:
        assert torch.equal(straight[name], resumed[name]), name


def test_muon_is_for_hidden_matrices():
    parameters = _parameters()
    optimizer = build_optimizer(parameters, kind="muon", weight_decay=0, embeddings={"embed.weight"})
    _step(parameters, optimizer, 0)
    with_moments = {key.split("/")[0] for key in optimizer.state() if key.endswith("/exp_avg")}
    assert with_moments == {"embed.weight", "layer.bias", "norm.weight"}
    assert "layer.weight/momentum_buffer" in optimizer.state()


def test_only_matrices_decay():
    parameters = _parameters()
    before = {name: p.detach().clone() for name, p in parameters.items()}
    optimizer = build_optimizer(parameters, kind="adamw", weight_decay=0.5)
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(0.1)
    for name, parameter in parameters.items():
        factor = 0.95 if parameter.dim() == 2 else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor)


def test_state_of_another_model_is_refused():
    optimizer = build_optimizer(_parameters(), kind="adamw", weight_decay=0)
    with pytest.raises(CheckpointError, match="another model"):
        optimizer.load_state({"other.weight/exp_avg": torch.zeros(2)})
