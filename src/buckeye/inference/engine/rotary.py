"""Rotary position embedding (Su et al. 2021, RoFormer, eq. 34) in the half-split layout of Hugging Face."""

from __future__ import annotations

import math

import torch

from buckeye.inference.engine.architecture import RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """Return the rotation angle per position of each pair of dimensions, float32 [head_dim / 2].

    "linear" divides all angles by `rope.factor`. "llama3" (Llama 3.1) divides the angles whose wavelength is
    long compared with the original context, keeps those with a short wavelength, and interpolates in between.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "default":
        return frequencies
    if rope.kind == "linear":
        return frequencies / rope.factor
    wavelengths = 2 * math.pi / frequencies
    smooth = (rope.original_max_positions / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    # 1 for a short wavelength, which stays unchanged; 0 for a long one, which is divided by the factor
    weight = smooth.clamp(0.0, 1.0)
    return (1 - weight) * frequencies / rope.factor + weight * frequencies


def rotation_tables(
    rope: RopeSpec, head_dim: int, positions: int, *, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine, [positions, head_dim] each.

    The first half of the sine is negated. So the rotated x is x * cos + swap_halves(x) * sin.
    """
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse_frequencies(rope, head_dim))
    cos = torch.cat([angles.cos(), angles.cos()], -1)
    sin = torch.cat([-angles.sin(), angles.sin()], -1)
    return cos.to(device, dtype), sin.to(device, dtype)
