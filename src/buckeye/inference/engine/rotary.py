"""Rotary position embedding (Su et al. 2021, RoFormer, eq. 34) in the half-split layout of Hugging Face."""

from __future__ import annotations

import math

import torch

from buckeye.inference.engine.architecture import RopeSpec


def inverse_frequencies(rope: RopeSpec) -> torch.Tensor:
    """Return the rotation angle per position of each pair of dimensions, float32 [rope.width / 2].

    "linear" divides all angles by `rope.factor`, and "longrope" each angle by its own factor. "llama3" (Llama
    3.1) and "yarn" (Peng et al. 2023, arXiv:2309.00071) divide the angles whose wavelength is long compared
    with the original context, keep those with a short wavelength, and interpolate in between.
    """
    exponents = torch.arange(0, rope.width, 2, dtype=torch.float32) / rope.width
    frequencies = 1.0 / rope.theta**exponents
    match rope.kind:
        case "linear":
            return frequencies / rope.factor
        case "longrope":
            return frequencies / torch.tensor(rope.factors)
        case "llama3":
            wavelengths = 2 * math.pi / frequencies
            smooth = (rope.original_max_positions / wavelengths - rope.low) / (rope.high - rope.low)
            # 1 for a short wavelength, which stays unchanged; 0 for a long one, which is divided
            weight = smooth.clamp(0.0, 1.0)
        case "yarn":
            weight = 1 - _yarn_ramp(rope)
        case _:
            return frequencies
    return (1 - weight) * frequencies / rope.factor + weight * frequencies


def _yarn_ramp(rope: RopeSpec) -> torch.Tensor:
    """Return 0 for an angle to keep, 1 for one to divide, and values in between, [rope.width / 2]."""
    first, last = (
        rope.width
        * math.log(rope.original_max_positions / (rotations * 2 * math.pi))
        / (2 * math.log(rope.theta))
        for rotations in (rope.high, rope.low)
    )
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.width - 1)
    if first == last:
        last += 0.001
    return ((torch.arange(rope.width // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)


def rotation_tables(
    rope: RopeSpec, positions: int, *, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine, [positions, rope.width] each.

    The first half of the sine is negated. So the rotated x is x * cos + swap_halves(x) * sin.
    """
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse_frequencies(rope))
    cos = rope.scale * torch.cat([angles.cos(), angles.cos()], -1)
    sin = rope.scale * torch.cat([-angles.sin(), angles.sin()], -1)
    return cos.to(device, dtype), sin.to(device, dtype)
