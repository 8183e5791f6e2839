"""Loading a sharded model without a whole copy of it in any process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.utils import cached_file

from buckeye.checkpoint.merge import MODEL_DIRECTORY
from buckeye.checkpoint.shards import MODEL_PREFIX, Region, StoredTensor, has_shards, read_shards
from buckeye.errors import UsageError
from buckeye.trainer.attention import PACKED_ATTENTION
from buckeye.trainer.model import ComputeDtype, Policy, make_policy, read_trainable
from buckeye.trainer.shards import read_like

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
