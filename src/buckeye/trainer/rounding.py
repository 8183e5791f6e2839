"""Weights that are trained in float32, as what is stored for those who sample with them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from buckeye.errors import RunError

_DROPPED_BITS = 16
"""A bfloat16 is the first half of a float32."""


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
    bits = x.contiguous().view(torch.int32)
    added = torch.randint(1 << _DROPPED_BITS, x.shape, dtype=torch.int32, generator=generator)
    cut = bits >> _DROPPED_BITS << _DROPPED_BITS
    rounded = (bits + added) >> _DROPPED_BITS << _DROPPED_BITS
    toward_zero, found = cut.view(torch.float32), rounded.view(torch.float32)
    found = torch.where(found.isfinite() | ~x.isfinite(), found, toward_zero)
    return torch.where(x.isfinite(), found, x).to(torch.bfloat16)  # exact: the second half is zero
