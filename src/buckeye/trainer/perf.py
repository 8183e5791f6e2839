"""How fast, and with how much memory."""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence

import torch
from transformers import PretrainedConfig

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


def training_flops(config: PretrainedConfig, matrix_elements: int, lengths: Sequence[int]) -> float:
    """Floating-point operations of a forward and backward pass over samples of these lengths.

    6 per token and element of the matrices that multiply it (`matrix_elements`), and for causal attention
    12 * layers * heads * head size * length / 2 per token (PaLM, arXiv 2204.02311, appendix B, halved because
    half of the scores are masked).
    """
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    squares = sum(length * length for length in lengths)
    return 6.0 * matrix_elements * sum(lengths) + 6.0 * config.num_hidden_layers * heads * head_dim * squares


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
