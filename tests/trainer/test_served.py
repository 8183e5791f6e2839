"""The share of a training step that reaches the weights that engines sample with."""

import copy
import logging

import numpy as np
import pytest
import torch

from buckeye.trainer.model.policy import load_policy
from buckeye.trainer.output.weight_rounding import RoundingMonitor, empty_published, round_tensor
from buckeye.transport.batches import Sample
from tests.general_models import tiny_model as tiny_general_model

from .rl_runs import records

CPU = torch.device("cpu")


def nearest(name, values):
    return values.to(torch.bfloat16)


def stochastic(name, values):
    return round_tensor(name, values, seed=1, out=empty_published(values, torch.bfloat16, values.device))


def sample(*ids):
    count = len(ids)
    return Sample(
        token_ids=np.array(ids, np.int32),
        loss_mask=np.array([False] + [True] * (count - 1)),
        logprobs=np.zeros(count, np.float32),
        versions=np.zeros(count, np.int32),
        advantages=np.zeros(count, np.float32),
        temperature=1.0,
    )


@pytest.fixture
def policy(tiny_model):
    """Policy whose weights are exact in bfloat16."""
    policy = load_policy(str(tiny_model), CPU, compute_dtype="float32")
    with torch.no_grad():
        for parameter in policy.trainable.values():
            parameter.copy_(parameter.to(torch.bfloat16))
    return policy


def published(policy, store=nearest):
    return {name: store(name, parameter.detach()) for name, parameter in policy.trainable.items()}


@torch.no_grad()
def scale(policy, factor):
    for parameter in policy.trainable.values():
        parameter.mul_(factor)


def test_unchanged_weights_have_no_divergence(policy):
    served = RoundingMonitor(policy, published(policy), interval=5)
    assert served.measure(published(policy), [sample(5, 6, 7)]) == {
        "weights/changed_share": 0.0,
        "weights/served_kl": pytest.approx(0.0, abs=1e-9),
    }


def test_small_change_is_lost_unless_rounding_is_stochastic(policy):
    found = {}
    for store in (nearest, stochastic):
        trained = copy.deepcopy(policy)
        served = RoundingMonitor(trained, published(trained, store), interval=5)
        scale(trained, 1 + 2**-8 / 10)
        found[store] = served.measure(published(trained, store), [])
    assert found[nearest] == {"weights/changed_share": 0.0, "weights/arrived_share": 0.0}
    assert 0.02 < found[stochastic]["weights/changed_share"] < 0.12  # 1/20 to 1/10 of the last place
    assert found[stochastic]["weights/arrived_share"] == pytest.approx(1.0, abs=0.15)


def test_divergence_by_hand(policy):
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in policy.trainable.values():
            parameter.mul_(1 + 0.02 * torch.randn_like(parameter))
    before = {name: parameter.clone() for name, parameter in policy.trainable.items()}

    def coarse(name, values):
        return (values * 16).round() / 16

    ids = [3, 9, 27, 81, 17]
    served_model = copy.deepcopy(policy.model)
    with torch.no_grad():
        for parameter in served_model.parameters():
            parameter.copy_(coarse("", parameter))
        [p, q] = [load_logprobs(model, ids) for model in (policy.model, served_model)]
    expected = float((p.exp() * (p - q)).sum(-1).mean())
    rounded = published(policy, coarse)
    values = RoundingMonitor(policy, rounded, interval=5).measure(rounded, [sample(*ids)])
    assert expected > 1e-3
    assert values["weights/served_kl"] == pytest.approx(expected, rel=1e-3)
    for name, parameter in policy.trainable.items():
        assert torch.equal(parameter, before[name])


def test_measurement_adds_no_hooks_to_the_experts(tmp_path):
    tiny_general_model("qwen3_moe", head_dim=8).save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path), CPU, compute_dtype="bfloat16")

    def hooks():
        return sum(len(module._forward_pre_hooks) for module in policy.model.modules())

    served, before = RoundingMonitor(policy, published(policy), interval=5), hooks()
    values = served.measure(published(policy), [sample(5, 6, 7)])
    assert values["weights/served_kl"] > 0.0
    assert hooks() == before > 0


def load_logprobs(model, ids):
    """Return the trainer's own log-probs of the next token after each token but the last."""
    from buckeye.trainer.model.policy import PolicyNetwork

    policy = PolicyNetwork(model, CPU, compute_dtype=torch.float32, flash=False)
    hidden = policy.hidden_states(torch.tensor(ids), [len(ids)])[:-1]
    return (hidden @ policy.head_weight.T).log_softmax(-1)


def test_weights_are_restored_after_an_error(policy):
    before = {name: parameter.clone() for name, parameter in policy.trainable.items()}
    served = RoundingMonitor(policy, published(policy), interval=5)
    wrong = published(policy)
    wrong[next(n for n in wrong if "layers.1" in n and "q_proj" in n)] = torch.zeros(3, 5)
    with pytest.raises(RuntimeError):
        served.measure(published(policy) | wrong, [sample(1, 2, 3)])
    for name, parameter in policy.trainable.items():
        assert torch.equal(parameter, before[name])


def test_measurement_is_due_at_powers_of_two_and_intervals(policy):
    served = RoundingMonitor(policy, published(policy), interval=20)
    assert [step for step in range(1, 61) if served.is_due(step)] == [1, 2, 4, 8, 16, 20, 40, 60]


def test_large_divergence_is_warned_about_once(policy, caplog, wording):
    served = RoundingMonitor(policy, published(policy), interval=5)
    scale(policy, 1.3)
    coarse = published(policy, lambda name, values: values.round(decimals=1))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            served.measure(coarse, [sample(1, 2, 3, 4, 5, 6)])
    [record] = caplog.records
    assert 'trainer.weights.rounding = "stochastic"' in record.getMessage()
    assert record.getMessage() == wording


@pytest.mark.parametrize(
    ("weights", "steps"),
    [
        ({"dtype": "bfloat16", "measure_interval": 3}, [0, 1, 2]),
        ({}, []),
        ({"dtype": "bfloat16", "measure_interval": None}, []),
    ],
)
def test_trainer_measures_published_weights(tmp_path, train, batches, weights, steps):
    train(tmp_path, batches[:3], weights=weights)
    measured = [r["step"] for r in records(tmp_path) if "weights/served_kl" in r]
    assert measured == steps
    if steps:
        assert all(0 <= r["weights/changed_share"] <= 1 for r in records(tmp_path))
