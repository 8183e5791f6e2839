"""This rank's part of a divided model: copied for a checkpoint, and read again, whoever wrote it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from buckeye.checkpoint.shards import Region, StoredTensor, finish_part, part_path
from buckeye.errors import CheckpointError
from buckeye.trainer.distributed import SHARD, TENSOR, Ranks


@dataclass(frozen=True, slots=True)
class Piece:
    """A rank's part of a tensor, in main memory; of which shape the whole is, and where in it this begins."""

    content: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]


def divides(ranks: Ranks) -> bool:
    """Whether no rank has the whole model."""
    return ranks.mesh is not None and ranks.mesh[SHARD].size() * ranks.mesh[TENSOR].size() > 1


def own_pieces(tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Piece]:
    """Copies of what this rank writes of each tensor. Of a piece that several ranks have, it is the first
    of them that does; a tensor under two names is written under the first. Communicates nothing."""
    pieces: dict[str, Piece] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        if id(tensor) in seen or not _is_ours(tensor, ranks):
            continue
        seen.add(id(tensor))
        region = _region(tensor)
        if 0 not in region.shape:
            content = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            copy = content.detach().to("cpu", copy=True).contiguous()
            pieces[name] = Piece(copy, tuple(tensor.shape), region.offset)
    return pieces


def write_pieces(directory: Path, rank: int, token: int, pieces: Mapping[str, Piece]) -> None:
    """Write this rank's part of a checkpoint."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file({name: piece.content for name, piece in pieces.items()}, part_path(directory, rank))
    places: dict[str, tuple[Sequence[int], Sequence[int]]] = {
        name: (piece.shape, piece.offset) for name, piece in pieces.items()
    }
    finish_part(directory, rank, token, places)


def read_like(stored: StoredTensor, name: str, like: Tensor | None) -> Tensor:
    """The part of a stored tensor that this rank has of `like`, divided as it is; the whole of one that is of
    another shape, or not divided. Only that part is read."""
    if not isinstance(like, DTensor) or tuple(like.shape) != stored.shape:
        return read_region(stored, name, Region((0,) * len(stored.shape), stored.shape))
    local = read_region(stored, name, _region(like)).to(like.to_local().device)
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def read_region(stored: StoredTensor, name: str, region: Region) -> Tensor:
    """A part of a stored tensor, put together from all pieces that have some of it."""
    if 0 in region.shape:
        return torch.empty(region.shape)
    result: Tensor | None = None
    for path, piece in stored.pieces:
        common = piece.common(region)
        if common is None:
            continue
        with safe_open(path, "pt") as file:
            content = _cut(file, name, common.within(piece))
        if common == region:
            return content
        if result is None:
            result = torch.empty(region.shape, dtype=content.dtype)
        result[common.within(region)] = content
    if result is None:
        raise CheckpointError(f"No shard has the part of {name} that begins at {region.offset}.")
    return result


def _cut(file: Any, name: str, slices: tuple[slice, ...]) -> Tensor:
    if not slices:
        return file.get_tensor(name)
    return file.get_slice(name)[slices].contiguous()  # fused optimizers do not look at strides


def _region(tensor: Tensor) -> Region:
    """Which part of the whole tensor this rank has."""
    if not isinstance(tensor, DTensor):
        return Region((0,) * tensor.dim(), tuple(tensor.shape))
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local = tuple(tensor.to_local().shape)
    if shape != local:
        raise CheckpointError(f"A shard has the shape {local} where {shape} was to be expected.")
    return Region(tuple(map(int, offset)), shape)


def _is_ours(tensor: Tensor, ranks: Ranks) -> bool:
    """Whether this rank writes its piece: it does if it is the first of all that have the same one."""
    if not isinstance(tensor, DTensor) or ranks.mesh is None:
        return ranks.first
    mesh = tensor.device_mesh
    divided = {
        name
        for name, placement in zip(mesh.mesh_dim_names or (), tensor.placements, strict=True)
        if not placement.is_replicate()
    }
    others = [name for name in ranks.mesh.mesh_dim_names or () if name not in divided]
    return all(ranks.mesh[name].get_local_rank() == 0 for name in others)
