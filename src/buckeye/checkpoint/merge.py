"""A complete model directory from the shards of a checkpoint, one tensor at a time."""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from buckeye import storage
from buckeye.checkpoint.shards import MODEL_PREFIX, Region, StoredTensor, has_shards, read_shards

if TYPE_CHECKING:
    import numpy.typing as npt

log = logging.getLogger(__name__)

MODEL_DIRECTORY = "model"
"""In the trainer's part of a checkpoint: the model, or, beside shards, all of it but the weights."""

_MOST_BYTES = 5_000_000_000  # of one file
_TYPES: dict[str, str] = {"F64": "f8", "F32": "f4", "I64": "i8", "I32": "i4", "U8": "u1", "BOOL": "b1"}


def complete_model(state: Path) -> Path:
    """The model directory of a checkpoint's trainer part. One that was written as shards is put together
    first and stays in the checkpoint, as long as that one does."""
    directory = state / MODEL_DIRECTORY
    if has_shards(state) and not list(directory.glob("*.safetensors")):
        log.info("Putting the shards of %s together to a complete model", state.parent)
        tensors = {
            name.removeprefix(MODEL_PREFIX): tensor
            for name, tensor in read_shards(state).items()
            if name.startswith(MODEL_PREFIX)
        }

        def fill(temporary: Path) -> None:
            shutil.copytree(directory, temporary, dirs_exist_ok=True)
            write_model_files(temporary, tensors)

        storage.write_directory(directory, fill, replace=True)
    return directory


def write_model_files(directory: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Write `model-*.safetensors` and their index, never holding more than one piece of a tensor."""
    files = _divide(tensors)
    names = [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    for name, members in zip(names, files, strict=True):
        _write_file(directory / name, {member: tensors[member] for member in members})
    index = {
        "metadata": {"total_size": sum(_bytes(tensor) for tensor in tensors.values())},
        "weight_map": {m: name for name, members in zip(names, files, strict=True) for m in members},
    }
    path = directory / "model.safetensors.index.json"
    path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _divide(tensors: Mapping[str, StoredTensor]) -> list[list[str]]:
    """The names of the tensors of each file."""
    files: list[list[str]] = []
    room = 0
    for name in sorted(tensors):
        size = _bytes(tensors[name])
        if size > room or not files:
            files.append([])
            room = _MOST_BYTES
        files[-1].append(name)
        room -= size
    return files


def _write_file(path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + _bytes(tensor)
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format wants the data aligned
    begin = 8 + len(text)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(begin + end)
    for name, tensor in tensors.items():
        _write_tensor(path, begin + header[name]["data_offsets"][0], name, tensor)


def _write_tensor(path: Path, position: int, name: str, tensor: StoredTensor) -> None:
    import numpy as np
    from safetensors import safe_open

    whole = Region((0,) * len(tensor.shape), tensor.shape)
    target: npt.NDArray[Any] = np.memmap(
        path, dtype=_TYPES[tensor.dtype], mode="r+", offset=position, shape=tensor.shape
    )
    for source, region in tensor.pieces:
        with safe_open(source, "numpy") as file:
            target[region.within(whole)] = file.get_tensor(MODEL_PREFIX + name)


def _bytes(tensor: StoredTensor) -> int:
    return math.prod(tensor.shape) * int(_TYPES[tensor.dtype][1])
