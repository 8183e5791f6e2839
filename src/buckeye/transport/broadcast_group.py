"""Process group that brings the files of new weights from the trainer's memory to the engines' memory.

On one machine, the engines read memory that the trainer shares. Other machines receive a broadcast. A group
serves one version and has its own file as rendezvous, so a lost process affects no later version. This module
imports only torch and the standard library: vLLM's workers load it in a separate environment.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

_BUFFER_BYTES = 2**25
_JOIN_SECONDS = 10.0
_SHARED_NAME = "buckeye-weights"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def allocate_shared(size: int) -> tuple[Tensor, int | None]:
    """Return a buffer, uint8, and the descriptor through which other processes can open it.

    The buffer is freed with the tensor and the descriptor, also if this process is killed. The descriptor is
    None if the system has no such buffers, or forbids them.
    """
    if hasattr(os, "memfd_create"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
            descriptor = os.memfd_create(_SHARED_NAME)
            opened.callback(os.close, descriptor)
            os.posix_fallocate(descriptor, 0, size)  # otherwise a write may end the process
            buffer = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
            opened.pop_all()
            return buffer, descriptor
    return torch.empty(size, dtype=torch.uint8), None


def open_shared(path: str, size: int) -> Tensor:
    """Return the content of a buffer of `allocate_shared`, from /proc/PID/fd/DESCRIPTOR.

    Raise `OSError` or `ValueError` for any other file, and for a smaller buffer than `size` bytes.
    """
    if not re.fullmatch(r"/proc/\d+/fd/\d+", path) or not os.readlink(path).startswith(
        f"/memfd:{_SHARED_NAME}"
    ):
        raise ValueError(f"{path!r} is not a shared buffer")
    with open(path, "rb") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY), dtype=torch.uint8)


class BroadcastGroup:
    """Group of `size` processes that meet in the file `store`. Rank 0 sends, and the others receive.

    With `loopback`, no other host can connect. The constructor waits until all processes have joined. All
    methods raise `RuntimeError` if a process is lost, or does not take part within `seconds`. The name of a
    store is `store_` and 32 hexadecimal digits; for another name, the constructor raises `ValueError`.
    """

    def __init__(self, store: Path, rank: int, size: int, *, loopback: bool, seconds: float) -> None:
        if not re.fullmatch(r"store_[0-9a-f]{32}", store.name):
            raise ValueError(f"{store.name!r} is not the name of a store")
        self._deadline = time.monotonic() + seconds
        rendezvous = dist.FileStore(str(store), size)
        rendezvous.set_timeout(timedelta(seconds=_JOIN_SECONDS))
        options = dist.ProcessGroupGloo._Options()
        options._threads = 1
        options._timeout = timedelta(seconds=_JOIN_SECONDS)
        options._devices = [_device(loopback=loopback)]
        self._group = dist.ProcessGroupGloo(rendezvous, rank, size, options)

    def transfer(self, files: Mapping[str, Tensor]) -> None:
        """Send the contents of files, uint8, or receive them in place, in buffers of bounded size."""
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        for name in sorted(files):
            for buffer in files[name].split(_BUFFER_BYTES):
                options.timeout = self._remaining()
                self._group.broadcast([buffer], options).wait()

    def _remaining(self) -> timedelta:
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise RuntimeError("the broadcast exceeded its deadline")
        return timedelta(seconds=remaining)

    def receive(
        self, sizes: Mapping[str, int], shared: Mapping[str, str], *, copies: bool
    ) -> dict[str, Tensor]:
        """Return the files by name: those that the trainer shares at the paths `shared`, or received ones.

        Without `copies`, shared ones may only be read until `finish`.
        """
        if shared:
            opened = {name: open_shared(shared[name], size) for name, size in sizes.items()}
            return {name: file.clone() for name, file in opened.items()} if copies else opened
        files = {name: torch.empty(size, dtype=torch.uint8) for name, size in sizes.items()}
        self.transfer(files)
        return files

    def finish(self) -> None:
        """Wait until no process reads the files of the trainer any more."""
        options = dist.BarrierOptions()
        options.timeout = self._remaining()
        self._group.barrier(options).wait()


def _device(*, loopback: bool) -> dist.ProcessGroupGloo.Device:
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if loopback:
        return dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
    if interface:
        return dist.ProcessGroupGloo.create_device(interface=interface.partition(",")[0])
    return dist.ProcessGroupGloo.create_default_device()


def split_safetensors(content: Tensor) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, as views of its content."""
    start = 8 + int.from_bytes(bytes(content[:8].tolist()), "little")
    header = json.loads(content[8:start].numpy().tobytes())
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = (start + offset for offset in entry["data_offsets"])
        dtype = _DTYPES.get(entry["dtype"])
        if dtype is None:
            raise ValueError(f"{name} has the unsupported dtype {entry['dtype']}")
        tensors[name] = content[begin:end].view(dtype).view(entry["shape"])
    return tensors
