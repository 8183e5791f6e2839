"""Speeds of GPU types, from the data sheets of the vendors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuSpeed:
    """Peak bfloat16 FLOP/s without sparsity, and bytes per second of the memory, of a GPU.

    `ampere_share` is the share of the peak that kernels for Ampere, such as FlashAttention-2, can reach.
    `grouped` is True if torch has a fast kernel for the products of experts.
    """

    flops: float
    bandwidth: float
    ampere_share: float = 1.0
    grouped: bool = True


_HOPPER, _BLACKWELL = 0.6, 0.25  # the rates of mma.sync, relative to the instructions of the newer types
_SPEEDS = {  # by a part of the name; the first match counts
    "B300": GpuSpeed(2250e12, 8.0e12, _BLACKWELL, grouped=False),
    "B200": GpuSpeed(2250e12, 8.0e12, _BLACKWELL, grouped=False),
    "GH200": GpuSpeed(989e12, 4.0e12, _HOPPER),
    "H200": GpuSpeed(989e12, 4.8e12, _HOPPER),
    "H100PCIE": GpuSpeed(756e12, 2.0e12, _HOPPER),
    "H100": GpuSpeed(989e12, 3.35e12, _HOPPER),
    "A100": GpuSpeed(312e12, 2.0e12),
    "L40S": GpuSpeed(362e12, 0.86e12),
    "L40": GpuSpeed(181e12, 0.86e12),
    "A6000": GpuSpeed(155e12, 0.77e12),
    "L4": GpuSpeed(121e12, 0.3e12),
    "RTX5090": GpuSpeed(210e12, 1.79e12),
    "RTX4090": GpuSpeed(165e12, 1.01e12),
    "RTX3090": GpuSpeed(71e12, 0.94e12),
}


def gpu_speed(name: str) -> GpuSpeed | None:
    """Return the speed of a GPU with a name such as "NVIDIA H100 80GB HBM3", or None for an unknown type."""
    key = name.replace(" ", "").replace("_", "").upper()
    return next((speed for part, speed in _SPEEDS.items() if part in key), None)
