"""A step's gradient: summed over the ranks, measured, and cut to length."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from buckeye.trainer.parallel.ranks import TENSOR, Ranks

_BUCKET_ELEMENTS = 16 * 2**20  # 64 MiB of float32

# Every tensor-parallel rank normalises the queries and keys of its own heads only.
_PARTIAL = ("q_norm.weight", "k_norm.weight")


def sum_gradients(
    parameters: Mapping[str, nn.Parameter], ranks: Ranks, *, dtype: torch.dtype = torch.float32
) -> None:
    """Make every gradient the sum over the whole batch; a missing one counts as zero. Sums that are not taken
    during the backward pass are exchanged as `dtype`."""
    for parameter in parameters.values():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    if ranks.mesh is None:
        if ranks.count > 1:
            _all_reduce(map(_gradient, parameters.values()), ranks, None, dtype)
    elif ranks.mesh[TENSOR].size() > 1:
        _agree(parameters, ranks, ranks.mesh[TENSOR])


def _agree(parameters: Mapping[str, nn.Parameter], ranks: Ranks, mesh: DeviceMesh) -> None:
    """Complete the gradients of what tensor-parallel ranks all hold. What they all computed is averaged: it
    is equal but for rounding, and must not drift apart."""
    undivided = {name: p for name, p in parameters.items() if TENSOR not in _split_over(p)}
    for name, parameter in undivided.items():
        if not name.endswith(_PARTIAL):
            _gradient(parameter).div_(mesh.size())
    _all_reduce(map(_gradient, undivided.values()), ranks, mesh.get_group(), torch.float32)


def gradient_norm(parameters: Iterable[nn.Parameter], ranks: Ranks) -> float:
    """The Euclidean norm of the whole gradient, the same on all ranks; not finite if any element is not."""
    groups: dict[tuple[str, ...], list[Tensor]] = {}
    for parameter in parameters:
        groups.setdefault(_split_over(parameter), []).append(_gradient(parameter))
    squares = []
    for dimensions, gradients in groups.items():
        square = torch.nn.utils.get_total_norm(gradients).to(ranks.device, torch.float64) ** 2
        for dimension in dimensions:
            assert ranks.mesh is not None
            dist.all_reduce(square, group=ranks.mesh[dimension].get_group())
        squares.append(float(square))
    return math.sqrt(sum(squares))


def clip_gradients(parameters: Iterable[nn.Parameter], norm: float, limit: float | None) -> None:
    """Shorten a gradient of length `norm` to `limit`; a shorter one, or without a limit, stays as it is."""
    if limit is not None and norm > limit:
        torch._foreach_mul_([_gradient(p) for p in parameters], limit / norm)


def _gradient(parameter: nn.Parameter) -> Tensor:
    """What this rank holds of a parameter's gradient."""
    assert parameter.grad is not None
    return parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad


def _split_over(parameter: nn.Parameter) -> tuple[str, ...]:
    """The dimensions of the mesh along which ranks hold different parts of a parameter."""
    if not isinstance(parameter, DTensor):
        return ()
    names = parameter.device_mesh.mesh_dim_names or ()
    return tuple(
        name
        for name, placement in zip(names, parameter.placements, strict=True)
        if not placement.is_replicate()
    )


def _all_reduce(
    gradients: Iterable[Tensor], ranks: Ranks, group: dist.ProcessGroup | None, dtype: torch.dtype
) -> None:
    for bucket in _buckets(gradients):
        flat = torch.cat([g.flatten() for g in bucket]).to(ranks.device, dtype)
        dist.all_reduce(flat, group=group)
        for gradient, summed in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            gradient.copy_(summed.view_as(gradient))


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    filled = 0
    for tensor in tensors:
        if bucket and filled + tensor.numel() > _BUCKET_ELEMENTS:
            yield bucket
            bucket, filled = [], 0
        bucket.append(tensor)
        filled += tensor.numel()
    if bucket:
        yield bucket
