"""The state of a model that several ranks divide: every rank writes its own part, nobody has the whole.

`shards/rank_<R>.safetensors` has rank R's pieces of tensors by the tensors' names, and `rank_<R>.json` says
where in the whole tensors they lie. The latter is written last, so it also says that the rank is done.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from buckeye.base import storage
from buckeye.base.disk import Patience
from buckeye.errors import CheckpointError

if TYPE_CHECKING:
    import numpy.typing as npt

SHARDS_DIRECTORY = "shards"
MODEL_PREFIX = "model/"
"""What the names of the model's tensors begin with; the others belong to its training."""

_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Region:
    """A box in a tensor: where it begins and how long it is, in each dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def common(self, other: Region) -> Region | None:
        """What two boxes of one tensor have in common, if anything."""
        starts = [max(a, b) for a, b in zip(self.offset, other.offset, strict=True)]
        ends = [min(a, b) for a, b in zip(self._ends(), other._ends(), strict=True)]
        lengths = [end - start for start, end in zip(starts, ends, strict=True)]
        return Region(tuple(starts), tuple(lengths)) if all(n > 0 for n in lengths) else None

    def within(self, outer: Region) -> tuple[slice, ...]:
        """The slices that cut this box out of the content of an `outer` one."""
        starts = [mine - theirs for mine, theirs in zip(self.offset, outer.offset, strict=True)]
        return tuple(slice(start, start + n) for start, n in zip(starts, self.shape, strict=True))

    def _ends(self) -> list[int]:
        return [start + length for start, length in zip(self.offset, self.shape, strict=True)]


@dataclass(slots=True)
class StoredTensor:
    """A tensor of a given shape, `dtype` as safetensors calls it, whose pieces lie in files: its content is
    theirs, and none overlap."""

    shape: tuple[int, ...]
    dtype: str
    pieces: list[tuple[Path, Region]] = field(default_factory=list)


def has_shards(state: Path) -> bool:
    """Whether a checkpoint's trainer part was written by ranks that divide the model."""
    return (state / SHARDS_DIRECTORY).is_dir()


def part_path(directory: Path, rank: int) -> Path:
    """Where the pieces of a rank are written."""
    return directory / f"rank_{rank}.safetensors"


def finish_part(
    directory: Path, rank: int, token: int, tensors: Mapping[str, tuple[Sequence[int], Sequence[int]]]
) -> None:
    """Say that `part_path` of a rank is written. `tensors`: name -> (shape of the whole tensor, where this
    piece of it begins). `token` is known to all ranks, and to none of another attempt."""
    path = part_path(directory, rank)
    _flush(path)
    content = {
        "token": token,
        "sha256": storage.sha256_file(path),
        "tensors": {name: {"shape": list(s), "offset": list(o)} for name, (s, o) in tensors.items()},
    }
    storage.write_file(path.with_suffix(".json"), json.dumps(content))


def await_parts(
    directory: Path,
    ranks: int,
    token: int,
    *,
    timeout_seconds: float,
    look: Callable[[], None] = lambda: None,
) -> dict[str, str]:
    """Wait until every rank has finished its part, and return the SHA-256 of the large files by their names.
    `look` is called again and again, to fetch what ranks elsewhere have said.

    Raises `CheckpointError` after `timeout_seconds`, in which nobody waited for disk space.
    """
    patience = Patience(timeout_seconds, directory.parent.parent)
    hashes: dict[int, str] = {}
    while len(hashes) < ranks:
        look()
        for rank in set(range(ranks)) - hashes.keys():
            digest = _finished(part_path(directory, rank).with_suffix(".json"), token)
            if digest is not None:
                hashes[rank] = digest
        if patience.is_over():
            late = ", ".join(str(rank) for rank in range(ranks) if rank not in hashes)
            raise CheckpointError(
                f"Trainer rank {late} did not write its shards to {directory} within {timeout_seconds:g} s "
                "(trainer.dist_timeout_seconds, or ckpt.store_timeout). All ranks must see the same "
                "output_dir, or have a store in common (ckpt.store)."
            )
        if len(hashes) < ranks:
            time.sleep(_POLL_SECONDS)
    return {part_path(directory, rank).name: digest for rank, digest in hashes.items()}


def link_or_copy(source: str, target: str) -> None:
    """Give a file that nobody writes to again a second name."""
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)


def read_shards(state: Path) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint's trainer part by its name. Raises `CheckpointError` if the ranks' parts
    do not make complete tensors."""
    from safetensors import SafetensorError

    directory = state / SHARDS_DIRECTORY
    found: dict[str, StoredTensor] = {}
    try:
        for path in sorted(directory.glob("rank_*.json")):
            _add_part(found, path)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"The shards in {directory} cannot be read ({error!r}).") from error
    for name, tensor in found.items():
        stored = sum(math.prod(region.shape) for _, region in tensor.pieces)
        if stored != math.prod(tensor.shape):
            raise CheckpointError(
                f"The shards in {directory} have {stored} elements of {name} and not "
                f"{math.prod(tensor.shape)}: a rank's file is missing. Resume from another step."
            )
    return found


def _add_part(found: dict[str, StoredTensor], path: Path) -> None:
    from safetensors import safe_open

    data = path.with_suffix(".safetensors")
    tensors = storage.read_json(path)["tensors"]
    with safe_open(data, "numpy") as file:
        for name, place in tensors.items():
            piece = file.get_slice(name)
            tensor = found.setdefault(name, StoredTensor(tuple(place["shape"]), piece.get_dtype()))
            tensor.pieces.append((data, Region(tuple(place["offset"]), tuple(piece.get_shape()))))


def _finished(path: Path, token: int) -> str | None:
    try:
        content = storage.read_json(path)
        return str(content["sha256"]) if content["token"] == token else None
    except (FileNotFoundError, ValueError, KeyError, TypeError):  # not there, or nothing that a rank has said
        return None


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


# A complete model directory from the shards of a checkpoint, one tensor at a time.

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


# Which model an adapter belongs to: a digest that is cheap and tells the weights of models apart.

_SAMPLES = 64
_SAMPLE_BYTES = 4096


@cache
def base_digest(base: str) -> str | None:
    """SHA-256 over the names, sizes and headers of a model directory's safetensors files and over samples of
    4 KiB at 64 even distances in each; None for what is no directory with such files.

    Training changes nearly every weight, so that two models of one shape differ in the samples.
    """
    files = sorted(Path(base).glob("*.safetensors"))
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            _add(digest, file, path.name, path.stat().st_size)
    return digest.hexdigest() if files else None


def _add(digest: hashlib._Hash, file: BinaryIO, name: str, size: int) -> None:
    prefix = file.read(8)
    header = int.from_bytes(prefix, "little")
    digest.update(f"{name} {size} ".encode() + prefix + file.read(header))
    start = 8 + header
    for index in range(_SAMPLES):
        file.seek(start + (size - start) * index // _SAMPLES)
        digest.update(file.read(_SAMPLE_BYTES))
