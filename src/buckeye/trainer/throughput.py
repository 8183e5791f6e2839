"""How fast, and with how much memory."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass

import torch

# Dense bfloat16 FLOP/s without sparsity, from the makers' data sheets, by a part of the device's name.
_PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX A6000": 155e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What went through a model: `tokens`, shared prefixes counted once, and their `cost` in tokens, which
    counts attention too (as `packing.plan_bins` estimates it)."""

    tokens: int = 0
    cost: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(tokens=self.tokens + other.tokens, cost=self.cost + other.cost)


def training_flops(work: Work, matrix_elements: int, *, frozen_elements: int = 0) -> float:
    """Floating-point operations of a forward and backward pass.

    6 per token and element of the matrices that multiply it (`matrix_elements`), 4 for the `frozen_elements`
    among them, whose gradient nobody needs, and for causal attention 12 * layers * heads * head size per pair
    of tokens that see each other (PaLM, arXiv 2204.02311, appendix B, without the masked half of the scores).
    A cost counts the latter in units of the former, so it stands for both.
    """
    return 6.0 * matrix_elements * work.cost - 2.0 * frozen_elements * work.tokens


def peak_flops(device: torch.device) -> float | None:
    """What the device could do per second in bfloat16; None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for part, flops in _PEAK_FLOPS.items() if part in name), None)


def peak_memory_gib(device: torch.device) -> float:
    """The most memory this process has held: on the GPU, or resident where it computes on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20
