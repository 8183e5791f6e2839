"""Files of published weights in memory. A new version is rounded into them and written without a copy."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from buckeye.transport.weights import MANIFEST

_HASHING_THREADS = 8


class StoredWeights:
    """Contents of the files of a published version. Between versions, only values of tensors change.

    `files` are the contents of the safetensors files, uint8, by name. `tensors` are views of them by the name
    in the model; a tensor with two names appears twice.
    """

    def __init__(self) -> None:
        self.files: dict[str, Tensor] = {}
        self.tensors: dict[str, Tensor] = {}
        self._other: dict[str, bytes] = {}

    def write(self, directory: Path) -> dict[str, str]:
        """Write all files. Return the SHA-256 of the safetensors files."""
        with ThreadPoolExecutor(min(_HASHING_THREADS, len(self.files)), "sha256") as threads:
            digests = threads.map(_sha256, self.files.values())  # runs while the files are written
            for name, content in self._other.items():
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                (directory / name).write_bytes(content)
            for name, image in self.files.items():
                (directory / name).write_bytes(memoryview(image.numpy()))
            return dict(zip(self.files, digests, strict=True))


def read_stored_weights(
    directory: Path, tensors: Mapping[str, Tensor], stored_name: Callable[[str], str], *, pinned: bool
) -> StoredWeights | None:
    """Return the contents of the files in `directory`, which were saved from `tensors`. Values are not read.

    `stored_name` returns the name in the files of a tensor of the model. With `pinned`, GPUs copy faster into
    the tensors. Return None if the files have other tensors, because saving has split or joined some.
    """
    stored = StoredWeights()
    views: dict[str, Tensor] = {}
    by_name = {stored_name(name): tensor for name, tensor in tensors.items()}
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        name = path.relative_to(directory).as_posix()
        if path.suffix != ".safetensors":
            if name != MANIFEST:
                stored._other[name] = path.read_bytes()
            continue
        with path.open("rb") as file:
            size = file.read(8)
            header = file.read(int.from_bytes(size, "little"))
        start = len(size) + len(header)
        image = torch.empty(path.stat().st_size, dtype=torch.uint8, pin_memory=pinned)
        image[:start] = torch.frombuffer(bytearray(size + header), dtype=torch.uint8)
        stored.files[name] = image
        for key, entry in json.loads(header).items():
            if key == "__metadata__":
                continue
            tensor = by_name.get(key)
            begin, end = (start + offset for offset in entry["data_offsets"])
            if tensor is None or list(tensor.shape) != entry["shape"] or tensor.nbytes != end - begin:
                return None
            views[key] = image[begin:end].view(tensor.dtype).view(tensor.shape)
    saved = {id(by_name[key]): view for key, view in views.items()}  # of two names, files have one
    if not all(id(tensor) in saved for tensor in tensors.values()):
        return None
    stored.tensors = {name: saved[id(tensor)] for name, tensor in tensors.items()}
    return stored


def _sha256(image: Tensor) -> str:
    return hashlib.sha256(memoryview(image.numpy())).hexdigest()
