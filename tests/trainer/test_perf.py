"""Hand-computed FLOPs."""

import numpy as np
import pytest
import torch

from buckeye.trainer.data.packing import pack_micro_batch, plan_bins
from buckeye.trainer.learner import Work, format_step, peak_flops, peak_memory_gib, training_flops
from buckeye.trainer.model.experts import load_metrics
from buckeye.trainer.model.policy import load_policy
from tests.general_models import tiny_model as tiny_general_model


def test_flops_by_hand(tiny_model):
    # 10 matrix elements; samples of 3 and 5 tokens, whose 9 + 25 pairs, half of them masked, cost 12 tokens
    work = Work(tokens=3, cost=3.0) + Work(tokens=5, cost=5.0) + Work(cost=12.0)
    assert training_flops(work, 10) == 6 * 10 * 20
    assert training_flops(work, 10, frozen_elements=8) == 6 * 10 * 20 - 2 * 8 * 8
    # per token and matrix element 6, and per pair 12 * layers * heads * head size
    policy = load_policy(str(tiny_model), torch.device("cpu"))
    bins = plan_bins([np.arange(3), np.arange(10, 15)], 64, pair_cost=policy.pair_cost)
    work = Work(tokens=8, cost=sum(b.cost for b in bins))
    expected = 6 * policy.matrix_elements * 8 + 12 * 2 * 4 * 8 * (9 + 25) / 2
    assert training_flops(work, policy.matrix_elements) == pytest.approx(expected)


def test_matrix_elements(tiny_model, tiny_llama):
    layer = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48
    for model in (tiny_model, tiny_llama):  # tied or not, the output projection counts once
        assert load_policy(str(model), torch.device("cpu")).matrix_elements == 2 * layer + 264 * 32


def test_the_cpu_has_memory_but_no_known_peak():
    assert peak_flops(torch.device("cpu")) is None
    assert peak_memory_gib(torch.device("cpu")) > 0.01


def test_format_step():
    values = {
        "seconds": 5.1,
        "loss": -0.00123,
        "entropy": 0.43211,
        "mismatch_kl": 0.0004,
        "grad_norm": 0.1234,
        "lr": 3e-6,
        "tokens_per_second": 12345.4,
        "mfu": 0.111,
        "peak_memory_gib": 12.5,
        "other": 1.0,
    }
    assert format_step(3, values) == (
        "Step 3 | Time: 5.10s | Loss: -0.0012 | Entropy: 0.4321 | Mismatch KL: 0.0004 | Grad. Norm: 0.1234 | "
        "LR: 3.00e-06 | Throughput: 12345 tokens/s | MFU: 11.1% | Peak Mem.: 12.5 GiB"
    )


def test_experts_that_a_token_does_not_use_cost_nothing(tmp_path):
    """The model has 4 experts, and a token uses 2 of them."""
    tiny_general_model("qwen3_moe", head_dim=8).save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path), torch.device("cpu"), compute_dtype="float32")
    attention = 32 * 32 + 2 * 32 * 16 + 32 * 32
    layer = attention + 4 * 32 + 2 * 3 * 32 * 24  # the router chooses among all
    assert policy.matrix_elements == 2 * layer + 96 * 32
    policy.model.requires_grad_(False)
    assert policy.frozen_matrix_elements == policy.matrix_elements


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])  # packed rows, and padded ones
def test_load_of_the_experts(tmp_path, family):
    """A router that prefers experts 1 and 3 sends all tokens there: 2 times the mean load, half is unused."""
    changes = {"first_k_dense_replace": 0} if family == "deepseek_v3" else {}
    model = tiny_general_model(family, **changes)
    with torch.no_grad():
        for layer in model.model.layers:
            router = layer.mlp.gate
            router.weight.zero_()
            if hasattr(router, "e_score_correction_bias"):
                router.e_score_correction_bias.copy_(torch.tensor([0.0, 9.0, 0.0, 9.0]))
    model.save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path), torch.device("cpu"), compute_dtype="float32")
    samples = [np.arange(7, dtype=np.int32), np.arange(50, 53, dtype=np.int32)]
    row = pack_micro_batch(samples, [np.arange(len(ids)) > 0 for ids in samples], torch.device("cpu"))
    assert len(policy.expert_loads.take()) == 2  # of the check of the model, which needs no gradient
    policy(row, torch.ones(len(row.targets)))
    counts = policy.expert_loads.take()
    assert counts.sum(1).tolist() == [2 * 10] * 2
    used = counts > 0
    assert used.sum(1).tolist() == [2, 2]
    assert load_metrics(counts) == {"experts/max_load": 2.0, "experts/unused": 0.5}
    assert load_metrics(policy.expert_loads.take()) == {}
