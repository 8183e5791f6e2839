"""Process group that sends the files of new weights from the trainer's memory to the engines' memory.

A group serves one version and has its own file as rendezvous, so a lost process affects no later version.
This module imports only torch and the standard library: vLLM's workers load it in a separate environment.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

_BUFFER_BYTES = 2**25
_JOIN_SECONDS = 10.0
_HASHING_THREADS = 8
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
                remaining = self._deadline - time.monotonic()
                if remaining <= 0:
                    raise RuntimeError("the broadcast exceeded its deadline")
                options.timeout = timedelta(seconds=remaining)
                self._group.broadcast([buffer], options).wait()

    def receive(self, sizes: Mapping[str, int], digests: Mapping[str, str]) -> dict[str, Tensor]:
        """Return the received files by name. Raise `ValueError` unless they have these SHA-256."""
        files = {name: torch.empty(size, dtype=torch.uint8) for name, size in sizes.items()}
        self.transfer(files)
        if sha256_of(files) != dict(digests):
            raise ValueError("the SHA-256 of the received weights differs from the published one")
        return files


def _device(*, loopback: bool) -> dist.ProcessGroupGloo.Device:
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if loopback:
        return dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
    if interface:
        return dist.ProcessGroupGloo.create_device(interface=interface.partition(",")[0])
    return dist.ProcessGroupGloo.create_default_device()


def sha256_of(files: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the SHA-256 of the contents of files, uint8, by name."""

    def sha256(content: Tensor) -> str:
        return hashlib.sha256(memoryview(content.numpy())).hexdigest()

    with ThreadPoolExecutor(min(_HASHING_THREADS, max(1, len(files))), "sha256") as threads:
        return dict(zip(files, threads.map(sha256, files.values()), strict=True))


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
