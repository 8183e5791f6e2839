"""Cache of the keys and values of sequences, in slots of equal size."""

from __future__ import annotations

import math
import mmap

import psutil
import torch

from buckeye.errors import InferenceError
from buckeye.inference.engine.architecture import ModelSpec

_SHARE_OF_RAM = 0.25
_MIN_SHARE_OF_FREE = 0.25
_GPU_RESERVE_BYTES = 2 * 2**30  # for the activations of a prompt, and for libraries


class KVCache:
    """Tensor `kv` [layers, slots + spare, 2 x kv heads, max_len, head_dim] with keys and values.

    In the third dimension, the key heads are first. The first `slots` slots hold running sequences. The
    `spare` slots after them hold prefixes of ended sequences.

    On a CPU, the operating system allocates a page of the cache when it is first written. So a large
    `max_len` needs memory only for sequences that become that long.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        slots: int,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device,
        spare: int = 0,
        allocate: bool = True,
    ) -> None:
        self._shape = (spec.num_layers, slots + spare, 2 * spec.num_kv_heads, max_len, spec.head_dim)
        self.slots = slots
        self.spare = spare
        self.max_len = max_len
        self.kv = torch.empty(0, dtype=dtype, device=device)
        if allocate:
            self.allocate()

    @property
    def dtype(self) -> torch.dtype:
        """Type of the keys and values."""
        return self.kv.dtype

    @property
    def is_allocated(self) -> bool:
        """True unless the memory of the cache is free."""
        return self.kv.dim() > 1

    def allocate(self) -> None:
        """Allocate the memory of the cache, filled with zeros."""
        self.kv = allocate_zeros(self._shape, self.kv.dtype, self.kv.device)

    def release(self) -> None:
        """Free the memory of the cache, until `allocate`."""
        self.kv = self.kv.new_empty(0)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of slot `source` to slot `target`."""
        self.kv[:, target, :, :length] = self.kv[:, source, :, :length]

    def clear(self, slot: int, length: int) -> None:
        """Write zeros over the first `length` positions of a slot."""
        self.kv[:, slot, :, :length] = 0


def slot_bytes(spec: ModelSpec, max_len: int, dtype: torch.dtype) -> int:
    """Return the size in bytes of one sequence's keys and values at full length."""
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * max_len * dtype.itemsize


def count_slots(size: int, *, max_num_seqs: int, max_len: int, budget: int) -> int:
    """Return the number of sequences of `size` bytes, which have `max_len` tokens, that fit into `budget`.

    The result is at most `max_num_seqs`. Raise `InferenceError` if none fits.
    """
    slots = min(max_num_seqs, budget // size)
    if slots < 1:
        raise InferenceError(
            f"the cache is too small: one sequence of {max_len} tokens needs {size / 1e9:.2f} GB, and the "
            f"budget is {budget / 1e9:.2f} GB",
            code="BK-MEMORY",
            hint="lower inference.model.max_model_len, or raise inference.kv_cache_gb "
            "(on a GPU: inference.gpu_memory_utilization)",
        )
    return slots


def cache_budget(device: torch.device, *, gpu_share: float, logits: int) -> int:
    """Return the default cache size in bytes.

    On a CPU the size is a quarter of the RAM. On a GPU the process may use the fraction `gpu_share` of the
    memory. From this share, the function subtracts the weights, a second copy of the weights for updates, 4
    times `logits` bytes, and 2 GiB for activations and libraries. The cache gets at least a quarter of the
    free memory.
    """
    if device.type != "cuda":
        return int(_SHARE_OF_RAM * psutil.virtual_memory().total)
    free, total = torch.cuda.mem_get_info(device)
    weights = torch.cuda.memory_allocated(device)
    left = min(int(gpu_share * total) - weights, free) - weights - 4 * logits - _GPU_RESERVE_BYTES
    return max(left, int(_MIN_SHARE_OF_FREE * (free - weights)), 0)


def allocate_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros. On a CPU, the operating system allocates a page when it is first written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    count = math.prod(shape)
    return torch.frombuffer(mmap.mmap(-1, count * dtype.itemsize), dtype=dtype, count=count).view(shape)
