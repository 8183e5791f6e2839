"""Ranks of a trainer: several processes that each compute a part of the gradient of every step.

Each rank divides its loss by a count over the whole batch. So gradients are *summed* over ranks, never
averaged.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from buckeye.base.process import STORE_VARIABLE, run_identity
from buckeye.base.storage import private_folder
from buckeye.config.trainer import ModelConfig
from buckeye.errors import DiskFullError, UsageError

REPLICATE, SHARD, TENSOR = "replicate", "shard", "tensor"

_BACKLOG = 1024


@dataclass(frozen=True, slots=True)
class Ranks:
    """Position of this process among the processes of the trainer, and communication between them.

    `mesh` [replicate, shard, tensor] is the layout of a sharded model, or None if each rank has the whole
    model. Ranks that differ only in their `tensor` coordinate compute the same samples together.
    """

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh | None = None

    @property
    def is_rank_zero(self) -> bool:
        """True for rank 0, which writes files."""
        return self.rank == 0

    @property
    def dp_size(self) -> int:
        """Number of parts into which the samples of a step are divided."""
        return self.world_size if self.mesh is None else self.world_size // self.mesh[TENSOR].size()

    @property
    def dp_rank(self) -> int:
        """Index of the part of the samples that this rank computes."""
        return self.rank // (self.world_size // self.dp_size)

    def sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the sum of each value over all ranks, in float64.

        All ranks must call this method with equal keys in equal order. Tensor-parallel ranks, which compute
        the same samples, have equal values, which count once.
        """
        if self.world_size == 1:
            return dict(values)
        tensor = torch.tensor(list(values.values()), dtype=torch.float64, device=self.device)
        if self.rank % (self.world_size // self.dp_size):
            tensor.zero_()
        dist.all_reduce(tensor)
        return dict(zip(values, tensor.tolist(), strict=True))

    def max(self, value: int) -> int:
        """Return the largest value of all ranks. All ranks must call this method."""
        if self.world_size == 1:
            return value
        tensor = torch.tensor(value, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return int(tensor)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks in main memory, in the order of the ranks.

        The tensors must have equal shape and dtype on all ranks.
        """
        if self.world_size == 1:
            return [tensor]
        local = tensor.to(self.device)
        gathered = [torch.empty_like(local) for _ in range(self.world_size)]
        dist.all_gather(gathered, local)
        return [part.cpu() for part in gathered]

    def broadcast(self, data: bytes | None) -> bytes:
        """Return the data of rank 0 on all ranks. Other ranks pass None. The data must not be empty."""
        if self.world_size == 1 and data is not None:
            return data
        size = self.max(len(data or b""))
        buffer = torch.frombuffer(bytearray(data or size), dtype=torch.uint8).to(self.device)
        dist.broadcast(buffer, src=0)
        return buffer.cpu().numpy().tobytes()

    def close(self) -> None:
        """End the communication. All ranks must call this method once."""
        if dist.is_initialized():
            dist.destroy_process_group()


def local_rank() -> int:
    """Return the index of this process's GPU among the visible GPUs of the node, from `LOCAL_RANK`."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def check_shared_folder(ranks: Ranks, folder: Path) -> None:
    """Raise `UsageError` unless `folder` is one folder on all ranks. All ranks must call this function."""
    probe = folder / f".ranks-{ranks.max(secrets.randbits(62) if ranks.is_rank_zero else 0):x}"
    if ranks.is_rank_zero:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
    ranks.max(0)
    missing = ranks.all_gather(torch.tensor([int(not probe.exists())]))
    if ranks.is_rank_zero:
        probe.unlink()
    listed = ", ".join(str(rank) for rank, absent in enumerate(missing) if int(absent))
    if listed:
        raise UsageError(
            f"the folder {folder} is not visible to trainer rank {listed}",
            code="BK-CLUSTER",
            hint="put output_dir on a file system that all nodes share",
        )


def join_ranks(device: torch.device, model: ModelConfig, *, timeout_seconds: float) -> Ranks:
    """Connect to the other ranks of the trainer, and lay out the model among them.

    The environment variables `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` are those of `torchrun`.

    Raise `UsageError` if the settings do not fit the number of ranks. If another rank does not join a
    collective operation within `timeout_seconds`, this process ends with torch's error.
    """
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    copies = model.dp_replicate * model.tp
    if world_size % copies:
        raise UsageError(
            f"{world_size} trainer ranks cannot be divided into dp_replicate = {model.dp_replicate} replicas "
            f"of tp = {model.tp} tensor-parallel ranks",
            code="BK-CONFIG-CONFLICT",
            at="trainer.model",
            hint=f"start a multiple of {copies} ranks, or change dp_replicate or tp",
        )
    sharded = _is_sharded(model, world_size, device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # NCCL, shards and kernels use the current device
    if world_size > 1:
        if os.environ.get("MASTER_ADDR") == "127.0.0.1":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else gloo looks up this host's name
        timeout = timedelta(seconds=timeout_seconds)
        dist.init_process_group(
            _backend(device),
            store=_open_store(rank, world_size, timeout),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
    elif sharded:
        dist.init_process_group(_backend(device), store=dist.HashStore(), rank=0, world_size=1)
    return Ranks(rank, world_size, device, _make_mesh(model, world_size, device) if sharded else None)


def write_on_rank_zero(ranks: Ranks, write: Callable[[], object]) -> None:
    """Call `write` on rank 0 only. All ranks must call this function, and wait for rank 0.

    If rank 0 has no disk space, all ranks raise `DiskFullError`.
    """
    error: DiskFullError | None = None
    if ranks.is_rank_zero:
        try:
            write()
        except DiskFullError as disk_full:
            error = disk_full
    if ranks.max(int(error is not None)):
        raise error or DiskFullError("the disk of rank 0 is full", hint="see the log of rank 0")


def _open_store(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Return the store in which ranks exchange their addresses.

    If `rl` started all ranks on one host, the store is a file that only this user can read. Otherwise rank 0
    runs a server that listens only on `MASTER_ADDR`. torch's default server would listen on all addresses,
    without authentication.
    """
    name = os.environ.get(STORE_VARIABLE)
    if name is not None:
        file = private_folder("stores") / f"{name}-{run_identity().attempt}"
        store: dist.Store = dist.FileStore(str(file), world_size)
        store.set_timeout(timeout)
        return store
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_server = rank == 0 and not os.environ.get("TORCHELASTIC_RUN_ID")  # torchrun has its own server
    listener = _listen(address, port) if is_server else None
    return dist.TCPStore(
        address,
        port,
        world_size=world_size,
        is_master=is_server,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
    )


def _listen(address: str, port: int) -> socket.socket:
    family, kind, protocol, _, socket_address = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(socket_address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise UsageError(
            f"rank 0 cannot listen on {address}, port {port}: {error.strerror}",
            code="BK-CLUSTER",
            at="MASTER_ADDR",
            hint="set MASTER_ADDR to an address of this host, and MASTER_PORT to a free port",
        ) from None
    return listener


def _backend(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def _is_sharded(model: ModelConfig, world_size: int, device: torch.device) -> bool:
    """Return True if the ranks shard the model."""
    if model.tp > 1 or model.dp_replicate > 1 or model.sharding == "full":
        return True
    on_gpu = device.type == "cuda"
    return model.sharding == "auto" and on_gpu and (world_size > 1 or model.fsdp_cpu_offload)


def _make_mesh(model: ModelConfig, world_size: int, device: torch.device) -> DeviceMesh:
    groups = world_size // model.tp
    replicas = groups if model.sharding == "none" else model.dp_replicate
    shape = (replicas, groups // replicas, model.tp)
    return init_device_mesh(device.type, shape, mesh_dim_names=(REPLICATE, SHARD, TENSOR))
