"""Hand-computed FLOPs."""

import numpy as np
import pytest
import torch

from buckeye.trainer.data.packing import plan_bins
from buckeye.trainer.learner import Work, format_step, peak_flops, peak_memory_gib, training_flops
from buckeye.trainer.model.policy import load_policy


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
