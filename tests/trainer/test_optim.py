"""Hand-computed schedules and updates; optimizers restore their state exactly."""

import re
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from buckeye.base.distribution import install_command
from buckeye.config.trainer import (
    AdamW8bitConfig,
    AdamWConfig,
    ConstantSchedulerConfig,
    CosineSchedulerConfig,
    LinearSchedulerConfig,
    MuonConfig,
    SGDConfig,
)
from buckeye.errors import CheckpointError, UsageError
from buckeye.trainer.optim.optimizer import LearningRateSchedule, build_optimizer
from tests.devices import DEVICES

SCHEDULES = {
    "constant": ConstantSchedulerConfig,
    "linear": LinearSchedulerConfig,
    "cosine": CosineSchedulerConfig,
}


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({"type": "constant", "max_steps": 8}, [1.0] * 9),
        (
            {"type": "linear", "warmup": 2, "decay": 4, "min_lr": 0.2, "max_steps": 8},
            [0.5, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2],
        ),
        ({"type": "linear", "warmup": 2, "decay": 4}, [0.5] + [1.0] * 8),  # without an end it never falls
        (
            {"type": "linear", "warmup": 2, "decay": 100, "max_steps": 8},
            [0.5, 1.0, 1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0.0],
        ),
        (
            {"type": "cosine", "warmup": 2, "min_lr": 0.2, "max_steps": 6},
            [0.5, 1.0, 1.0, 0.6 + 0.4 * 2**-0.5, 0.6, 0.6 - 0.4 * 2**-0.5, 0.2, 0.2, 0.2],
        ),
    ],
)
def test_learning_rates(settings, rates):
    settings = dict(settings)
    max_steps = settings.pop("max_steps", None)
    config = SCHEDULES[settings["type"]](**settings)
    schedule = LearningRateSchedule(config=config, peak=1.0, max_steps=max_steps)
    assert [schedule.at(step) for step in range(9)] == pytest.approx(rates)


SHAPES = {"embed.weight": (6, 4), "layer.weight": (4, 4), "layer.bias": (4,), "norm.weight": (4,)}


def _parameters(**more):
    torch.manual_seed(0)
    shapes = {**SHAPES, **more}
    return {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}


def _step(parameters, optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step(0.1)


CONFIGS = {"adamw": AdamWConfig, "adamw8bit": AdamW8bitConfig, "muon": MuonConfig, "sgd": SGDConfig}


def _build(parameters, *, kind, embeddings=(), **settings):
    return build_optimizer(parameters, CONFIGS[kind](**settings), embeddings=embeddings)


needs_bitsandbytes = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")


KINDS = ["adamw", "muon", "sgd", pytest.param("adamw8bit", marks=needs_bitsandbytes)]


@pytest.mark.parametrize("kind", KINDS)
def test_optimizer_state_round_trips_exactly(kind):
    def build(parameters):
        return _build(parameters, kind=kind, weight_decay=0.1, embeddings={"embed.weight"})

    straight = _parameters(large=(64, 80))
    optimizer = build(straight)
    assert optimizer.state() == {}
    for seed in range(2):
        _step(straight, optimizer, seed)
    stored = load(save(optimizer.state()))
    resumed = {name: nn.Parameter(p.detach().clone()) for name, p in straight.items()}
    other = build(dict(reversed(resumed.items())))  # names decide, not the order
    other.load_state(stored)
    for seed in range(2, 4):
        _step(straight, optimizer, seed)
        _step(resumed, other, seed)
    for name in straight:
        assert torch.equal(straight[name], resumed[name]), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("settings", [AdamWConfig(), SGDConfig(momentum=0.9)])
def test_offloaded_state_is_on_the_device_only_during_an_update(settings, device):
    results = []
    for offloads in (False, True):
        parameters = {n: nn.Parameter(p.detach().to(device)) for n, p in _parameters().items()}
        optimizer = build_optimizer(parameters, settings)
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            for parameter in parameters.values():
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(device)
            optimizer.step(0.1)
            if offloads and seed == 0:  # a state that a resume has loaded
                optimizer.offload()
            moments = {key: value for key, value in optimizer.state().items() if value.dim()}
            assert {value.device.type for value in moments.values()} == {"cpu" if offloads else device}
        results.append(
            [*(p.detach().cpu() for p in parameters.values()), *(m.cpu() for m in moments.values())]
        )
    assert all(map(torch.equal, *results))


def test_muon_is_for_hidden_matrices():
    parameters = _parameters()
    optimizer = _build(parameters, kind="muon", weight_decay=0, embeddings={"embed.weight"})
    _step(parameters, optimizer, 0)
    with_moments = {key.split("/")[0] for key in optimizer.state() if key.endswith("/muon.exp_avg")}
    assert with_moments == {"embed.weight", "layer.bias", "norm.weight"}
    assert "layer.weight/muon.momentum_buffer" in optimizer.state()


def test_only_matrices_decay():
    parameters = _parameters()
    before = {name: p.detach().clone() for name, p in parameters.items()}
    optimizer = _build(parameters, kind="adamw", weight_decay=0.5)
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(0.1)
    for name, parameter in parameters.items():
        factor = 0.95 if parameter.dim() == 2 else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor)


def test_load_state_refuses_state_of_another_model():
    optimizer = _build(_parameters(), kind="adamw", weight_decay=0)
    with pytest.raises(CheckpointError, match="parameters that the model does not have"):
        optimizer.load_state({"other.weight/adamw.exp_avg": torch.zeros(2)})


@pytest.mark.parametrize("written", ["adamw", "muon", "sgd"])
@pytest.mark.parametrize("now", KINDS)
def test_load_state_refuses_state_of_another_optimizer(written, now, refusal):
    """With matrices only, as in an adapter, momentum of muon and of sgd has the same names."""
    parameters = {name: nn.Parameter(torch.randn(8, 4)) for name in ("lora_A", "lora_B")}
    optimizer = _build(parameters, kind=written, weight_decay=0)
    _step(parameters, optimizer, 0)
    stored = load(save(optimizer.state()))
    other = _build(parameters, kind=now, weight_decay=0)
    if written == now:
        other.load_state(stored)
        return
    with refusal(CheckpointError):
        other.load_state(stored)


def test_muon_keeps_a_separate_momentum():
    """Without momentum only the second gradient counts; orthogonalized, it is plus or minus the identity."""
    for momentum, moved in ((0.0, 0.0), (0.9, -2.0)):
        parameters = {"a": nn.Parameter(torch.zeros(4, 4))}
        optimizer = _build(parameters, kind="muon", weight_decay=0, momentum=momentum, nesterov=False)
        for sign in (1.0, -0.5):
            parameters["a"].grad = sign * torch.eye(4)
            optimizer.step(0.1)
        size = 0.1 * 0.2 * 4**0.5  # the scale of `match_rms_adamw`
        assert parameters["a"].diagonal().mean().item() == pytest.approx(moved * size, abs=0.5 * size)


def test_muon_without_other_parameters():
    parameters = {"a": nn.Parameter(torch.eye(4)), "b": nn.Parameter(torch.eye(4))}
    optimizer = _build(parameters, kind="muon", weight_decay=0)
    _step(parameters, optimizer, 0)
    assert set(optimizer.state()) == {"a/muon.momentum_buffer", "b/muon.momentum_buffer"}


@needs_bitsandbytes
def test_moments_in_8_bits_follow_those_in_32():
    """8 bits need a quarter of the memory; steps differ by a few percent of the learning rate."""
    shapes = {"matrix": (128, 64)}
    exact, small = _parameters(**shapes), _parameters(**shapes)
    optimizers = [
        _build(exact, kind="adamw", weight_decay=0.1),
        _build(small, kind="adamw8bit", weight_decay=0.1),
    ]
    for seed in range(5):
        _step(exact, optimizers[0], seed)
        _step(small, optimizers[1], seed)
    sizes = [
        sum(t.nbytes for key, t in o.state().items() if key.startswith("matrix/") and "qmap" not in key)
        for o in optimizers
    ]
    assert sizes[1] < 0.27 * sizes[0]
    difference = (exact["matrix"] - small["matrix"]).detach().abs()
    assert difference.mean() < 0.02  # five steps of 0.1
    assert difference.max() > 0
    torch.testing.assert_close(exact["norm.weight"], small["norm.weight"])  # too small for 8 bits


def test_adamw8bit_without_bitsandbytes_is_refused(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=re.escape(install_command("optim8bit"))):
        _build(_parameters(), kind="adamw8bit", weight_decay=0)
