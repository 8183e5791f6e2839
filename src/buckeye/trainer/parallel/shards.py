"""Saving and loading of the shards of a model and its optimizer, with `torch.distributed.checkpoint`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import cached_file

from buckeye.base.disk import is_disk_full
from buckeye.errors import CheckpointError, DiskFullError, UsageError
from buckeye.trainer.model.attention import PACKED_ATTENTION
from buckeye.trainer.model.policy import ComputeDtype, PolicyNetwork, make_policy, read_trainable_config
from buckeye.trainer.model.trainable import model_load_error
from buckeye.trainer.parallel.ranks import SHARD, TENSOR, Ranks

_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


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


def empty_policy(
    name: str, device: torch.device, *, flash: bool, compute_dtype: ComputeDtype = "auto"
) -> PolicyNetwork:
    """Return a policy on the meta device. Its parameters have shapes, but no memory.

    Shard the policy, then call `load_policy_shards`.

    Raise `UsageError` if the model does not exist or cannot be trained.
    """
    return make_policy(_empty_model(name), name, device, flash=flash, compute_dtype=compute_dtype)


def _empty_model(name: str) -> PreTrainedModel:
    config = read_trainable_config(name, sharded=True)
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation=PACKED_ATTENTION
            )
    except Exception as error:  # transformers raises arbitrary exceptions for an incomplete model directory
        raise model_load_error(name, error) from error
    return model


def can_load_shards(name: str) -> bool:
    """Return True if the safetensors files of a model have every parameter by its name in the model.

    The model must have no buffers but the frequencies of the rotary embedding, which are not in files.
    """
    model, directory = _empty_model(name), _find_weights_directory(name)
    if directory is None or any("rotary_emb" not in buffer for buffer, _ in model.named_buffers()):
        return False
    with _open_reader(directory) as reader:
        return dict(model.named_parameters()).keys() <= reader.read_metadata().state_dict_metadata.keys()


@torch.no_grad()
def load_policy_shards(policy: PolicyNetwork, name: str, *, offloaded: bool) -> None:
    """Read the shards of this rank from the model's safetensors files.

    The shards are on the device of the policy, or in main memory if `offloaded`. Raise `UsageError` if a
    parameter is missing in the files.
    """
    model = policy.model
    policy.to_empty(device="cpu" if offloaded else policy.device)
    rotary = type(model.base_model.rotary_emb)  # its frequencies are not in the files
    model.base_model.rotary_emb = rotary(model.config).to(policy.device)
    parameters = dict(model.named_parameters())
    try:
        with _open_reader(_weights_directory(name)) as reader:
            missing = sorted(parameters.keys() - reader.read_metadata().state_dict_metadata.keys())
            if missing:
                raise UsageError(
                    f"the model {name!r} is incomplete: {missing[:3]} ... missing",
                    code="BK-MODEL-DAMAGED",
                    hint="download or copy the model again",
                )
            dcp.load(parameters, storage_reader=reader, no_dist=True)
    except (OSError, RuntimeError, CheckpointError) as error:
        raise UsageError(f"the model {name!r} cannot be loaded: {error}", code="BK-MODEL-DAMAGED") from error


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


@contextmanager
def _open_reader(directory: Path) -> Iterator[dcp.HuggingFaceStorageReader]:
    try:
        with warnings.catch_warnings():
            # expected: each rank reads without communication
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield dcp.HuggingFaceStorageReader(str(directory))
    except SafetensorError as error:
        raise CheckpointError(
            f"the shards in {directory} cannot be read: {error!r}", code="BK-CHECKPOINT-DAMAGED"
        ) from error
    except dcp.CheckpointException as error:
        reasons = "; ".join(sorted({repr(failure) for failure, _ in error.failures.values()}))
        raise CheckpointError(
            f"the shards in {directory} cannot be read: {reasons}", code="BK-CHECKPOINT-DAMAGED"
        ) from error


def _weights_directory(name: str) -> Path:
    """Return the folder with the safetensors files of a local directory or a hub name."""
    directory = _find_weights_directory(name)
    if directory is None:
        raise UsageError(
            f"the model {name!r} has neither {_FILE} nor {_INDEX}",
            code="BK-MODEL-UNSUPPORTED",
            hint="leave trainer.model.load_using_meta out",
        )
    return directory


def _find_weights_directory(name: str) -> Path | None:
    for file in (_INDEX, _FILE):
        path = cached_file(name, file, _raise_exceptions_for_missing_entries=False)
        if path:
            return Path(path).parent
    return None
