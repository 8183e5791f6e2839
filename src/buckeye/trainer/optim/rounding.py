"""Weights that are trained in float32, as what is stored for those who sample with them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from buckeye.errors import RunError

_DROPPED_BITS = 16
"""A bfloat16 is the first half of a float32."""
_AT_A_TIME = 2**18
"""Elements that are rounded together: they stay in the processor's cache."""


def stored_as(
    tensors: Mapping[str, Tensor], dtype: torch.dtype, *, stochastic: bool, seed: int
) -> dict[str, Tensor]:
    """Floating-point tensors as `dtype`, rounded to nearest or, to bfloat16, `stochastic`; others as they
    are. A tensor under two names is one tensor afterwards too.

    What is drawn depends on `seed` and a tensor's name alone. So a weight that has not moved is stored as
    before, and what changes from one version to the next is training, not the dice. Raises `RunError` for a
    weight that `dtype` cannot hold.
    """
    stored: dict[int, Tensor] = {}
    for name, tensor in tensors.items():
        if id(tensor) not in stored:
            stored[id(tensor)] = _stored(name, tensor, dtype, seed=seed if stochastic else None)
    return {name: stored[id(tensor)] for name, tensor in tensors.items()}


def _stored(name: str, tensor: Tensor, dtype: torch.dtype, *, seed: int | None) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    if seed is not None and dtype is torch.bfloat16:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
        return stochastic_bfloat16(tensor, generator)
    rounded = tensor.to(dtype)
    if dtype is torch.float16 and not torch.equal(rounded.isfinite(), tensor.isfinite()):
        raise RunError(
            f"{name} has a weight of {float(tensor.abs().max()):.3g}, and float16 ends at 65504: set "
            'trainer.weights.dtype = "bfloat16".'
        )
    return rounded


def stochastic_bfloat16(x: Tensor, generator: torch.Generator) -> Tensor:
    """Float32 as bfloat16, each rounded to one of its two neighbours with a probability by its distance, so
    that the mean is the value itself (Gupta et al. 2015, arXiv:1502.02551, section 3). A value between the
    last finite one and infinity becomes the former. On the CPU."""
    rounded = torch.empty(x.shape, dtype=torch.bfloat16)
    values = x.contiguous().view(-1).split(_AT_A_TIME)
    for part, found in zip(values, rounded.view(-1).split(_AT_A_TIME), strict=True):
        found.copy_(_rounded_up_or_down(part, generator))
    return rounded


def _rounded_up_or_down(x: Tensor, generator: torch.Generator) -> Tensor:
    """What is dropped, and 16 random bits, may together carry into what is kept."""
    bits = x.view(torch.int32)
    drawn = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None, generator=generator)
    added = drawn.view(torch.int16)[: x.numel()].to(torch.int32).bitwise_and_((1 << _DROPPED_BITS) - 1)
    found = _first_half(added.add_(bits))
    if x.abs().amax() < torch.finfo(torch.bfloat16).max:
        return found
    found = torch.where(found.isfinite(), found, _first_half(bits))
    return torch.where(x.isfinite(), found, x.to(torch.bfloat16))


def _first_half(bits: Tensor) -> Tensor:
    return (bits >> _DROPPED_BITS).to(torch.int16).view(torch.bfloat16)
