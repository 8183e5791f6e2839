"""The ranks of a trainer: several processes that each compute a share of every step's gradient.

The loss is divided by a count over the whole batch before it is differentiated, so gradients are *summed*
over ranks. They are exchanged once, at the end of a step: ranks may have different numbers of bins, or none.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

_BUCKET_ELEMENTS = 16 * 2**20  # 64 MiB of float32


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's place among the trainer's processes. With one rank no method communicates."""

    rank: int
    count: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes files."""
        return self.rank == 0

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace every gradient by its sum over the ranks. A missing one counts as zero."""
        parameters = list(parameters)
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self.count == 1:
            return
        for bucket in _buckets(parameters):
            gradients = [p.grad for p in bucket if p.grad is not None]
            flat = torch.cat([g.flatten() for g in gradients])
            dist.all_reduce(flat)
            for gradient, summed in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(summed.view_as(gradient))

    def sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """Each value summed over the ranks, in float64. All ranks pass the same keys in one order."""
        if self.count == 1:
            return dict(values)
        tensor = torch.tensor(list(values.values()), dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return dict(zip(values, tensor.tolist(), strict=True))

    def max(self, value: int) -> int:
        """The largest of the ranks' values."""
        if self.count == 1:
            return value
        tensor = torch.tensor(value, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return int(tensor)

    def leave(self) -> None:
        """End the communication; call once, when all ranks do."""
        if self.count > 1:
            dist.destroy_process_group()


def local_rank() -> int:
    """Which of its node's visible GPUs this process takes (`LOCAL_RANK`)."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def join_ranks(device: torch.device, *, timeout_seconds: float) -> Ranks:
    """Meet the other ranks where `torchrun`'s variables say: `RANK`, `WORLD_SIZE`, `MASTER_ADDR`,
    `MASTER_PORT`.

    A rank that does not answer a collective within `timeout_seconds` ends this process with torch's error.
    """
    rank, count = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if count > 1:
        if os.environ.get("MASTER_ADDR") == "127.0.0.1" and sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # needs no name of this host
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))
    return Ranks(rank, count, device)


def _buckets(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    buckets: list[list[nn.Parameter]] = []
    filled = _BUCKET_ELEMENTS
    for parameter in parameters:
        if filled + parameter.numel() > _BUCKET_ELEMENTS:
            buckets.append([])
            filled = 0
        buckets[-1].append(parameter)
        filled += parameter.numel()
    return buckets
