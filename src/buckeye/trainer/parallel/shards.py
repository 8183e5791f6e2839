"""This rank's part of a divided model: copied for a checkpoint, and read again, whoever wrote it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.utils import cached_file

from buckeye.errors import CheckpointError, UsageError
from buckeye.trainer.model.attention import PACKED_ATTENTION
from buckeye.trainer.model.policy import ComputeDtype, Policy, make_policy, read_trainable
from buckeye.trainer.parallel.ranks import SHARD, TENSOR, Ranks
from buckeye.transport.checkpoint.shards import (
    MODEL_DIRECTORY,
    MODEL_PREFIX,
    Region,
    StoredTensor,
    finish_part,
    has_shards,
    part_path,
    read_shards,
)


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


# Loading a sharded model without a whole copy of it in any process.

_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def empty_policy(
    name: str, device: torch.device, *, flash: bool, compute_dtype: ComputeDtype = "auto"
) -> Policy:
    """A policy whose parameters have shapes and no memory yet: shard it, then `fill_policy`.

    Raises `UsageError` as `load_policy` does.
    """
    config = read_trainable(name)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation=PACKED_ATTENTION
            )
    except Exception as error:  # transformers raises any class for a folder that is no whole model
        raise UsageError(f"The model {name!r} cannot be loaded: {error}") from error
    return make_policy(model, name, device, flash=flash, compute_dtype=compute_dtype)


@torch.no_grad()
def fill_policy(policy: Policy, name: str, *, offloaded: bool) -> None:
    """Read this rank's shards from the model's safetensors files, one parameter at a time, to the device, or
    to main memory if they are `offloaded` there.

    Raises `UsageError` if the files do not hold every parameter.
    """
    model = policy.model
    policy.module.to_empty(device="cpu" if offloaded else policy.device)
    rotary = type(model.base_model.rotary_emb)  # its frequencies are in no file
    model.base_model.rotary_emb = rotary(model.config).to(policy.device)
    _fill(model, _stored(name), name)


@torch.no_grad()
def load_shards(
    state: Path, device: torch.device, *, flash: bool, compute_dtype: ComputeDtype = "auto"
) -> Policy:
    """The whole policy from the shards of a checkpoint's trainer part, read one parameter at a time.

    Raises `CheckpointError` if they are damaged.
    """
    name = str(state / MODEL_DIRECTORY)
    config = AutoConfig.from_pretrained(name)
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=PACKED_ATTENTION
        )
    model.tie_weights()  # which was left out with the initial weights
    _fill(model, _stored(name), name)
    return make_policy(model.to(device), name, device, flash=flash, compute_dtype=compute_dtype)


def _fill(model: PreTrainedModel, stored: Mapping[str, tuple[str, StoredTensor]], name: str) -> None:
    parameters = dict(model.named_parameters())
    missing = sorted(parameters.keys() - stored.keys())
    if missing:
        raise UsageError(f"The model {name!r} is incomplete: {missing[:3]} ... not stored.")
    try:
        for key, parameter in parameters.items():
            written_as, tensor = stored[key]
            parameter.copy_(read_like(tensor, written_as, parameter))
    except (OSError, RuntimeError, SafetensorError) as error:
        raise UsageError(f"The model {name!r} cannot be loaded: {error}") from error


def _stored(name: str) -> dict[str, tuple[str, StoredTensor]]:
    """Parameter -> its name in the files, and where it is in them."""
    state = Path(name).parent
    if Path(name).name == MODEL_DIRECTORY and has_shards(state):
        return {
            key.removeprefix(MODEL_PREFIX): (key, tensor)
            for key, tensor in read_shards(state).items()
            if key.startswith(MODEL_PREFIX)
        }
    stored = {}
    for key, path in _files(name).items():
        with safe_open(path, "pt") as file:
            piece = file.get_slice(key)
        shape = tuple(piece.get_shape())
        whole = Region((0,) * len(shape), shape)
        stored[key] = (key, StoredTensor(shape, piece.get_dtype(), [(path, whole)]))
    return stored


def _files(name: str) -> dict[str, Path]:
    """In which file each tensor of a model directory or hub name is."""
    index = _find(name, _INDEX)
    if index is not None:
        content = json.loads(index.read_text(encoding="utf-8"))
        return {tensor: index.parent / file for tensor, file in content["weight_map"].items()}
    single = _find(name, _FILE)
    if single is None:
        raise UsageError(
            f"The model {name!r} has neither {_FILE} nor {_INDEX}. Leave trainer.model.load_using_meta out."
        )
    with safe_open(single, "pt") as file:
        return dict.fromkeys(file.keys(), single)


def _find(name: str, file: str) -> Path | None:
    path = cached_file(name, file, _raise_exceptions_for_missing_entries=False)
    return Path(path) if path else None
