"""Files of published weights in memory. A new version is rounded into them and written without a copy."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from buckeye.transport.broadcast_group import allocate_shared
from buckeye.transport.weights import MANIFEST
from buckeye.transport.weights_digest import digest_contents


class StoredWeights:
    """Contents of the files of a published version. Between versions, only values of tensors change.

    `files` are the contents of the safetensors files, uint8, by name. `tensors` are views of them by the name
    in the model; a tensor with two names appears twice. `shared` are the paths under which other processes of
    this machine can open the files, by name, or empty.
    """

    def __init__(self) -> None:
        self.files: dict[str, Tensor] = {}
        self.tensors: dict[str, Tensor] = {}
        self.shared: dict[str, str] = {}
        self._other: dict[str, bytes] = {}

    @property
    def size(self) -> int:
        """Number of bytes of the safetensors files."""
        return sum(file.nbytes for file in self.files.values())

    def add_file(self, name: str, size: int, *, pinned: bool) -> Tensor:
        """Allocate the content of a file, and return it."""
        self.files[name], descriptor = allocate_shared(size)
        if descriptor is not None:
            self.shared[name] = f"/proc/{os.getpid()}/fd/{descriptor}"
            weakref.finalize(self, os.close, descriptor)
        if pinned:
            _pin(self.files[name])
        return self.files[name]

    def digests(self) -> dict[str, str]:
        """Return the digests of the safetensors files, by name."""
        return digest_contents({name: memoryview(file.numpy()) for name, file in self.files.items()})

    def write(self, directory: Path, digests: Mapping[str, str] | None = None) -> Mapping[str, str]:
        """Write all files. Return the digests of the safetensors files, which may be known as `digests`."""
        with ThreadPoolExecutor(1, "digest") as thread:  # computes while the files are written
            hashed = thread.submit(self.digests) if digests is None else None
            for name, content in self._other.items():
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                (directory / name).write_bytes(content)
            for name, image in self.files.items():
                (directory / name).write_bytes(memoryview(image.numpy()))
            return hashed.result() if hashed is not None else digests or {}


def _pin(buffer: Tensor) -> None:
    """Let a GPU copy into the buffer directly. If the system does not allow it, copies only take longer."""
    cudart = torch.cuda.cudart()
    result = cudart.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)
    if result != cudart.cudaError.success:
        with suppress(RuntimeError):  # CUDA reports the failure once more, to the next kernel
            torch.zeros(1, device="cuda")


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
        image = stored.add_file(name, path.stat().st_size, pinned=pinned)
        image[:start] = torch.frombuffer(bytearray(size + header), dtype=torch.uint8)
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
