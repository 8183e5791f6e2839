"""Saving and loading of the shards of a model and its optimizer, with `torch.distributed.checkpoint`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME, cached_file

from buckeye.base.disk import is_disk_full
from buckeye.base.storage import read_json
from buckeye.errors import CheckpointError, DiskFullError, UsageError
from buckeye.trainer.model.adapter_files import base_name
from buckeye.trainer.model.attention import PACKED_ATTENTION
from buckeye.trainer.model.policy import (
    ComputeDtype,
    PolicyNetwork,
    load_policy,
    make_policy,
    read_trainable_config,
)
from buckeye.trainer.model.trainable import model_load_error
from buckeye.trainer.parallel.ranks import SHARD, TENSOR, Ranks

_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_GROUP_BYTES = 2**23
_WITHOUT_META = "leave trainer.model.load_using_meta out"


def is_model_sharded(ranks: Ranks) -> bool:
    """Return True if each rank has only a part of the model. With replicas only, each rank has all of it."""
    return ranks.mesh is not None and ranks.mesh[SHARD].size() * ranks.mesh[TENSOR].size() > 1


def create_checkpoint_group(*, timeout_seconds: float) -> dist.ProcessGroup:
    """Create the process group for threads that save shards during training. All ranks must call this."""
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))


def copy_to_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy the shards of this rank to main memory. This function does not communicate."""
    stager = DefaultStager(StagingOptions(False, False, False, False))
    try:
        copies = stager.stage(dict(tensors))
    finally:
        stager.close()
    assert isinstance(copies, dict)
    return copies


def save_shards(directory: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
    """Write the shards of all ranks to `directory`, one file per rank. All ranks must call this function.

    `tensors` is the result of `copy_to_cpu`. If a rank fails, all ranks raise `DiskFullError` or
    `CheckpointError`.
    """
    writer = dcp.HuggingFaceStorageWriter(str(directory), save_distributed=True)
    try:
        dcp.save(dict(tensors), storage_writer=writer, process_group=group)
    except dcp.CheckpointException as error:
        failures = {rank: failure for rank, (failure, _) in error.failures.items()}
        listed = "; ".join(f"rank {rank}: {failure!r}" for rank, failure in sorted(failures.items()))
        kind = DiskFullError if any(map(is_disk_full, failures.values())) else CheckpointError
        raise kind(f"the shards in {directory} cannot be written: {listed}") from error
    except RuntimeError as error:  # a rank has ended
        raise CheckpointError(f"the shards in {directory} cannot be written: {error}") from error


def load_shards(directory: Path, like: Callable[[str], Tensor | None]) -> dict[str, Tensor]:
    """Read the tensors in a directory that `save_shards` wrote. This function does not communicate.

    `like(name)` is a tensor of the model, or None. If it is sharded and has the shape of the stored tensor,
    read only this rank's shard. Otherwise read the whole tensor. Raise `OSError` or `CheckpointError` if a
    file is damaged.
    """
    with _open_reader(directory) as reader:
        stored = _complete_tensors(reader)
        tensors = {
            name: _allocate(tuple(meta.size), meta.properties.dtype, like(name))
            for name, meta in stored.items()
        }
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def prepare_policy(
    name: str,
    device: torch.device,
    *,
    by_tensors: bool | None = None,
    flash: bool,
    compute_dtype: ComputeDtype,
    sharded: bool,
    frozen: bool = False,
    quantization: str | None = None,
) -> PolicyNetwork:
    """Return a policy that `fill_policy` completes, after adapters were added and the policy was sharded.

    With `by_tensors`, the parameters are on the meta device: they have shapes, but no memory. Without it, the
    policy has its weights already. None: as the files allow it. The other arguments are those of
    `load_policy`.
    """
    if by_tensors is None:
        by_tensors = can_load_tensors(name)
    if by_tensors and quantization is None:
        return empty_policy(name, device, flash=flash, compute_dtype=compute_dtype)
    return load_policy(
        name,
        device,
        flash=flash,
        compute_dtype=compute_dtype,
        sharded=sharded,
        frozen=frozen,
        quantization=quantization,
    )


def empty_policy(
    name: str, device: torch.device, *, flash: bool, compute_dtype: ComputeDtype = "auto"
) -> PolicyNetwork:
    """Return a policy on the meta device.

    Raise `UsageError` if the model does not exist, is not packed, or has buffers that are not in its files.
    """
    model = _empty_model(name)
    if buffers := _unknown_buffers(model):
        raise UsageError(
            f"the model {name!r} cannot be loaded tensor by tensor: {buffers[0]} is not in its files",
            code="BK-MODEL-UNSUPPORTED",
            hint=_WITHOUT_META,
        )
    return make_policy(model, name, device, flash=flash, compute_dtype=compute_dtype)


def _empty_model(name: str) -> PreTrainedModel:
    config = read_trainable_config(name, sharded=True)
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation=PACKED_ATTENTION
            )
        if cached_file(name, GENERATION_CONFIG_NAME, _raise_exceptions_for_missing_entries=False):
            model.generation_config = GenerationConfig.from_pretrained(name)
    except Exception as error:  # transformers raises arbitrary exceptions for an incomplete model directory
        raise model_load_error(name, error) from error
    return model


def can_load_tensors(name: str) -> bool:
    """Return True if the model packs rows, and safetensors files have every parameter by its name.

    The model must have no buffers but the frequencies of the rotary embedding, which are not in files. The
    files must not have a tensor that the model ties to another. For other models and damaged files,
    `load_policy` loads the model or raises the error.
    """
    try:
        model, weights = _empty_model(name), _find_weights(name)
        if weights is None or _unknown_buffers(model):
            return False
        with _open_reader(*weights) as reader:
            stored = reader.read_metadata().state_dict_metadata
    except (OSError, UsageError, CheckpointError):
        return False
    return not stored.keys() & model.all_tied_weights_keys.keys() and all(
        isinstance(meta := stored.get(parameter), TensorStorageMetadata) and meta.size == tensor.shape
        for parameter, tensor in model.named_parameters()
    )


def _unknown_buffers(model: PreTrainedModel) -> list[str]:
    """Return the names of the buffers whose values `fill_policy` cannot compute."""
    rotary = f"{model.base_model_prefix}.rotary_emb."
    return [name for name, _ in model.named_buffers() if not name.startswith(rotary)]


@torch.no_grad()
def fill_policy(policy: PolicyNetwork, name: str, *, offloaded: bool) -> None:
    """Read the parameters of an empty policy, or this rank's shards, from the model's safetensors files.

    They are on the device of the policy, or in main memory if `offloaded`. Values of an adapter are not set.
    Do nothing if the policy is not empty. Raise `UsageError` if a parameter is missing in the files, or if
    they have a tensor that the model ties to another.
    """
    model = policy.model
    if model.device.type != "meta":
        return
    policy.to_empty(device="cpu" if offloaded else policy.device)
    if not isinstance(policy, FSDPModule):  # FSDP keeps a shared parameter
        model.tie_weights()
    if hasattr(model.base_model, "rotary_emb"):  # its frequencies are not in the files
        rotary = type(model.base_model.rotary_emb)
        model.base_model.rotary_emb = rotary(model.config).to(policy.device)
    stored_names = [(base_name(parameter), tensor) for parameter, tensor in model.named_parameters()]
    tensors = [(stored, tensor) for stored, tensor in stored_names if stored is not None]
    try:
        with _open_reader(*_weights(name)) as reader:
            known = reader.read_metadata().state_dict_metadata.keys()
            missing = sorted(stored for stored, _ in tensors if stored not in known)
            if missing:
                raise UsageError(
                    f"the model {name!r} is incomplete: {missing[:3]} ... missing",
                    code="BK-MODEL-DAMAGED",
                    hint="download or copy the model again",
                )
            if tied := sorted(known & model.all_tied_weights_keys.keys()):
                raise UsageError(
                    f"the files of the model {name!r} have {tied[0]}, but tie_word_embeddings is true",
                    code="BK-MODEL-UNSUPPORTED",
                    hint=_WITHOUT_META,
                )
            for group in _groups(tensors):
                dcp.load(group, storage_reader=reader, no_dist=True)
    except (OSError, RuntimeError, CheckpointError) as error:
        raise UsageError(f"the model {name!r} cannot be loaded: {error}", code="BK-MODEL-DAMAGED") from error


def _groups(tensors: Sequence[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors in groups to read together, by name, the largest first.

    The files stay mapped while a group is read, so its pages count as memory of the process. Those of the
    largest tensor are read while the process has no other weights.
    """
    group: dict[str, Tensor] = {}
    for name, tensor in sorted(tensors, key=lambda item: -item[1].nbytes):
        size = sum(other.nbytes for other in group.values()) + tensor.nbytes
        if group and (name in group or size > _GROUP_BYTES):
            yield group
            group = {}
        group[name] = tensor
    yield group


def _complete_tensors(reader: dcp.HuggingFaceStorageReader) -> dict[str, TensorStorageMetadata]:
    stored = reader.read_metadata().state_dict_metadata
    tensors = {name: meta for name, meta in stored.items() if isinstance(meta, TensorStorageMetadata)}
    for name, meta in tensors.items():
        stored_elements, elements = sum(chunk.sizes.numel() for chunk in meta.chunks), meta.size.numel()
        if stored_elements != elements:
            raise CheckpointError(
                f"the shards in {reader.path} have {stored_elements} of {elements} elements of {name}: the "
                "file of a rank is missing",
                code="BK-CHECKPOINT-DAMAGED",
                hint="resume from another step",
            )
    return tensors


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, like: Tensor | None) -> Tensor:
    if not isinstance(like, DTensor) or tuple(like.shape) != shape:
        return torch.empty(shape, dtype=dtype)
    return torch.empty_like(like, dtype=dtype, requires_grad=False)


class _Files(FileSystem):
    """File system in which a directory has only the files with the given names."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        return [file for file in super().ls(path) if Path(file).name in self._names]


class _Reader(dcp.HuggingFaceStorageReader):
    """Reader that reads the headers of the files once, although it reads tensors in groups.

    It reads the files with the given names, or all files in the directory if `names` is None.
    """

    _metadata: Metadata | None = None

    def __init__(self, directory: Path, names: Collection[str] | None) -> None:
        super().__init__(str(directory))
        if names is not None:
            self.fs = _Files(names)

    def read_metadata(self) -> Metadata:
        if self._metadata is None:
            try:
                self._metadata = super().read_metadata()
            except KeyError as error:  # torch's reader does not know all types of safetensors
                raise CheckpointError(
                    f"{self.path} has a tensor of the unsupported type {error}", code="BK-CHECKPOINT-DAMAGED"
                ) from error
        return self._metadata


@contextmanager
def _open_reader(
    directory: Path, names: Collection[str] | None = None
) -> Iterator[dcp.HuggingFaceStorageReader]:
    try:
        with warnings.catch_warnings():
            # expected: each rank reads without communication
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield _Reader(directory, names)
    except SafetensorError as error:
        raise CheckpointError(
            f"the shards in {directory} cannot be read: {error!r}", code="BK-CHECKPOINT-DAMAGED"
        ) from error
    except dcp.CheckpointException as error:
        reasons = "; ".join(sorted({repr(failure) for failure, _ in error.failures.values()}))
        raise CheckpointError(
            f"the shards in {directory} cannot be read: {reasons}", code="BK-CHECKPOINT-DAMAGED"
        ) from error


def _weights(name: str) -> tuple[Path, Collection[str]]:
    weights = _find_weights(name)
    if weights is None:
        raise UsageError(
            f"the model {name!r} has neither {_FILE} nor {_INDEX}",
            code="BK-MODEL-UNSUPPORTED",
            hint=_WITHOUT_META,
        )
    return weights


def _find_weights(name: str) -> tuple[Path, Collection[str]] | None:
    """Return the folder of a local directory or a hub name, and the names of the files transformers loads.

    The folder may have other files. Raise `UsageError` if the index is damaged.
    """
    paths = (cached_file(name, file, _raise_exceptions_for_missing_entries=False) for file in (_FILE, _INDEX))
    path = next((Path(path) for path in paths if path), None)
    if path is None or path.name == _FILE:
        return None if path is None else (path.parent, {_FILE})
    try:
        return path.parent, set(read_json(path)["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"cannot read {path}: {error!r}", code="BK-MODEL-DAMAGED") from error
