"""A run as data: which processes it has, on which devices, with which commands. Built once, then rendered."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from buckeye.config.rl import RLConfig
from buckeye.errors import UsageError
from buckeye.run.disk import DiskEstimate, estimate_disk
from buckeye.run.machine import Machine
from buckeye.run.ports import Ports

RoleKind = Literal["gateway", "inference", "orchestrator", "trainer"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """One process of a run. `devices` are GPU ids, or CPU slots where there is no GPU. `argv` is a full
    command; `config_name` is the file in `configs/` that the process reads (None: it reads none), `log_name`
    its files in `logs/`."""

    kind: RoleKind
    index: int
    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    devices: tuple[int, ...] = ()
    port: int | None = None
    config_name: str | None
    log_name: str

    @property
    def title(self) -> str:
        """How messages call it."""
        return self.kind if self.kind == "orchestrator" else f"{self.kind} {self.index}"

    @property
    def stdout_name(self) -> str:
        """The file that has what it prints."""
        return f"{self.log_name}.stdout"


@dataclass(frozen=True, kw_only=True, slots=True)
class RolePlan:
    """All processes of a run in the order they are started, and what the run will need. `fixed_ports` are
    those of its servers that the user has chosen."""

    roles: tuple[Role, ...]
    on_gpu: bool
    disk: DiskEstimate
    fixed_ports: tuple[int, ...] = ()

    def of_kind(self, kind: RoleKind) -> list[Role]:
        return [role for role in self.roles if role.kind == kind]

    @property
    def base_urls(self) -> list[str]:
        """Where the engines answer."""
        return [f"http://127.0.0.1:{role.port}/v1" for role in self.of_kind("inference")]


def make_plan(config: RLConfig, machine: Machine, *, model_path: Path | None, ports: Ports) -> RolePlan:
    """Turn a resolved configuration into processes on this machine's devices. Ports that nobody has chosen
    come from `ports`.

    `model_path` is the local model directory, if there is one, for the disk estimate. Raises UsageError for
    GPU ids that do not exist, with what to type instead.
    """
    on_gpu = bool(machine.gpus) and config.trainer.model.device != "cpu"
    if on_gpu:
        _check_gpu_ids(config, machine)
    replicas = _replica_devices(config)
    ranks = [(gpu,) for gpu in config.trainer_gpu_ids]
    threads = _threads(
        machine, len(replicas), len(ranks), synchronous=config.orchestrator.max_async_level == 0
    )
    fixed = _fixed_ports(config, len(replicas))
    served = fixed or ports.choose(len(replicas))
    roles = [
        *_inference_roles(config, replicas, served, on_gpu=on_gpu, threads=threads),
        _role("orchestrator", 0, (), output_dir=config.output_dir, env={"CUDA_VISIBLE_DEVICES": ""}),
        *_trainer_roles(config, ranks, ports, on_gpu=on_gpu, threads=threads),
    ]
    return RolePlan(
        roles=tuple(roles),
        on_gpu=on_gpu,
        disk=estimate_disk(config, model_path),
        fixed_ports=tuple(fixed),
    )


def _replica_devices(config: RLConfig) -> list[tuple[int, ...]]:
    if config.inference is None:
        return []
    tp = config.inference.parallel.tp
    ids = config.inference_gpu_ids
    return [tuple(ids[i : i + tp]) for i in range(0, len(ids), tp)]


def _threads(machine: Machine, replicas: int, ranks: int, *, synchronous: bool) -> int:
    """Compute threads a process: processes that work at the same time share the cores. In synchronous mode
    sampling and training take turns."""
    at_once = max(replicas, ranks) if synchronous else replicas + ranks
    return max(1, machine.cores // max(at_once, 1))


def _fixed_ports(config: RLConfig, replicas: int) -> list[int]:
    """Those of the servers, if the user has chosen the first."""
    if config.inference is None or "port" not in config.inference.server.model_fields_set:
        return []
    return [config.inference.server.port + i for i in range(replicas)]


def _inference_roles(
    config: RLConfig,
    replicas: Sequence[tuple[int, ...]],
    ports: Sequence[int],
    *,
    on_gpu: bool,
    threads: int,
) -> list[Role]:
    return [
        _role(
            "inference",
            i,
            devices,
            output_dir=config.output_dir,
            port=port,
            env=_device_env(devices, on_gpu=on_gpu, threads=threads),
        )
        for i, (devices, port) in enumerate(zip(replicas, ports, strict=True))
    ]


def _trainer_roles(
    config: RLConfig, ranks: Sequence[tuple[int, ...]], ports: Ports, *, on_gpu: bool, threads: int
) -> list[Role]:
    """One process a rank, under the environment variables that `torchrun` would set on one node."""
    gang: dict[str, str] = {}
    if len(ranks) > 1:
        gang = {
            "WORLD_SIZE": str(len(ranks)),
            "LOCAL_WORLD_SIZE": str(len(ranks)),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(ports.choose(1)[0]),
        }
    roles = []
    for i, devices in enumerate(ranks):
        rank = {"RANK": str(i), "LOCAL_RANK": "0"} if gang else {}
        env = {**_device_env(devices, on_gpu=on_gpu, threads=threads), **gang, **rank}
        roles.append(_role("trainer", i, devices, output_dir=config.output_dir, env=env))
    return roles


def _device_env(devices: Sequence[int], *, on_gpu: bool, threads: int) -> dict[str, str]:
    visible = ",".join(map(str, devices)) if on_gpu else ""
    return {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # as nvidia-smi counts, whom the ids are from
        "CUDA_VISIBLE_DEVICES": visible,
        "BUCKEYE_THREADS": str(threads),
        "OMP_NUM_THREADS": str(threads),
    }


def _role(
    kind: RoleKind,
    index: int,
    devices: Sequence[int],
    *,
    output_dir: Path,
    env: dict[str, str],
    port: int | None = None,
) -> Role:
    config_name = f"{kind}_{index}.json" if kind == "inference" else f"{kind}.json"
    return Role(
        kind=kind,
        index=index,
        argv=(
            sys.executable,
            "-m",
            "buckeye",
            kind,
            "@",
            str(output_dir.absolute() / "configs" / config_name),
        ),
        env=env,
        devices=tuple(devices),
        port=port,
        config_name=config_name,
        log_name=kind if index == 0 else f"{kind}_{index}",
    )


def _check_gpu_ids(config: RLConfig, machine: Machine) -> None:
    inference_ids = config.inference_gpu_ids if config.inference is not None else []
    for flag, ids in (("inference-gpu-ids", inference_ids), ("trainer-gpu-ids", config.trainer_gpu_ids)):
        absent = [gpu for gpu in ids if gpu not in machine.gpus]
        if absent:
            there = ",".join(map(str, machine.gpus))
            raise UsageError(
                f"--{flag} asks for GPU {', '.join(map(str, absent))}, and this machine has {there}. "
                f"Choose among those, e.g. `--{flag} {machine.gpus[-1]}` (one GPU may serve both)."
            )
