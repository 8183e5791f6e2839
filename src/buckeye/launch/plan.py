"""The plan of a run as data: its processes, their devices and their commands."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from buckeye.base.process import PYTHON, STORE_VARIABLE, idle_spins
from buckeye.base.turns import TURNS_VARIABLE
from buckeye.config.rl import RLConfig
from buckeye.errors import UsageError
from buckeye.launch.preflight.devices import Machine
from buckeye.launch.preflight.disk import DiskEstimate, estimate_disk
from buckeye.launch.preflight.ports import Ports, UnassignedPorts, socket_variables

LOOPBACK = "127.0.0.1"

# The trainer allocates and frees large tensors often. By default glibc gives freed memory back to the system,
# which fills it with zeros before its next use: a tenth of a step on CPUs. With these settings, glibc keeps
# the memory of tensors below 32 MiB, up to 4 GiB.
KEEP_FREED_MEMORY = "glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=4294967296"
# Micro-batches differ in length, so an allocator with blocks of fixed sizes would fragment the memory. The
# second name is the name of the variable in older versions of PyTorch.
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE_SEGMENTS = "expandable_segments:True"

RoleKind = Literal["gateway", "workers", "inference", "orchestrator", "trainer"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """One process of a run.

    `devices` are GPU ids, or CPU slots on a machine without GPUs. `argv` is the full command. `config_name`
    is the file in `configs/` that the process reads, or None. The process runs on the host with number
    `node`. If it is a server, it listens at `host` and `port`.
    """

    kind: RoleKind
    index: int
    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    devices: tuple[int, ...] = ()
    node: int = 0
    host: str = LOOPBACK
    port: int | None = None
    config_name: str | None = None

    @property
    def title(self) -> str:
        """Name of the process in messages, such as `trainer 1`."""
        return self.kind if self.kind == "orchestrator" else f"{self.kind} {self.index}"

    @property
    def url(self) -> str:
        """URL of the process, if it is a server."""
        return f"http://{self.host}:{self.port}"

    @property
    def stdout_name(self) -> str:
        """Name of the file with the output of the process."""
        return f"{self.kind}.stdout" if self.index == 0 else f"{self.kind}_{self.index}.stdout"


@dataclass(frozen=True, kw_only=True, slots=True)
class RolePlan:
    """All processes of a run in start order, and the disk space that the run needs.

    `fixed_ports` are the server ports that the user set.
    """

    roles: tuple[Role, ...]
    on_gpu: bool
    disk: DiskEstimate
    fixed_ports: tuple[int, ...] = ()

    def of_kind(self, kind: RoleKind) -> list[Role]:
        return [role for role in self.roles if role.kind == kind]

    @property
    def base_urls(self) -> list[str]:
        """Base URLs of the inference servers, ending in `/v1`."""
        return [f"{role.url}/v1" for role in self.of_kind("inference")]


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentProcesses:
    """Processes that a run starts and supervises for its environments.

    All processes of the run get the variables in `env`, such as a generated key.
    """

    roles: tuple[Role, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanNode:
    """A host that a run may use.

    Other nodes reach the host at `address`. `variables` select the network interfaces of gloo and NCCL.
    `choose_ports(count)` reserves free ports of the host.
    """

    name: str
    machine: Machine
    choose_ports: Callable[[int], list[int]]
    address: str = LOOPBACK
    variables: Mapping[str, str] = field(default_factory=dict)


def make_plan(
    config: RLConfig,
    machine: Machine,
    *,
    model_path: Path | None,
    ports: Ports | UnassignedPorts,
    other_nodes: Sequence[PlanNode] | None = None,
    address: str | None = None,
) -> RolePlan:
    """Return the processes of a resolved configuration, placed on devices of all nodes.

    `machine` is node 0. `other_nodes` are the nodes from 1 on, which reach node 0 at `address`. By default,
    they have the resources of node 0. Ports that the user did not set come from `ports`. The disk estimate
    uses the local model directory `model_path`, if there is one. Raises UsageError for GPU ids that do not
    exist.
    """
    local = this_site(machine, ports, address)
    plan_nodes = [local, *([local] * (config.cluster.nodes - 1) if other_nodes is None else other_nodes)]
    used_nodes = _nodes_with_devices(config, plan_nodes)
    on_gpu = bool(used_nodes[0].machine.gpus) and config.trainer.model.device != "cpu"
    if on_gpu:
        for site in used_nodes:
            _check_gpu_ids(config, site)
    threads = [compute_threads(config, site.machine, number) for number, site in enumerate(plan_nodes)]
    roles = [
        *_inference_roles(config, plan_nodes, on_gpu=on_gpu, threads=threads),
        _role(config, "orchestrator", 0, env={"CUDA_VISIBLE_DEVICES": "", **_turns_env(config)}),
        *_trainer_roles(config, plan_nodes, on_gpu=on_gpu, threads=threads),
    ]
    return RolePlan(
        roles=tuple(roles),
        on_gpu=on_gpu,
        disk=estimate_disk(config, model_path),
        fixed_ports=tuple(fixed_ports(config)) if 0 in config.cluster.inference_node_numbers else (),
    )


def this_site(machine: Machine, ports: Ports | UnassignedPorts, address: str | None) -> PlanNode:
    """Return the host of the launcher. Other nodes, if any, reach this host at `address`."""
    site = PlanNode(name="this machine", machine=machine, choose_ports=ports.choose)
    if address is None:
        return site
    return replace(site, address=address, variables=socket_variables(address, os.environ))


def _nodes_with_devices(config: RLConfig, plan_nodes: Sequence[PlanNode]) -> list[PlanNode]:
    """Return the hosts on which the run uses devices."""
    inference = config.cluster.inference_node_numbers if config.inference is not None else []
    if _nodes_per_replica(config) > 1:
        inference = []  # Ray assigns the GPUs of inference nodes to vLLM
    return [plan_nodes[number] for number in sorted({*config.cluster.trainer_node_numbers, *inference})]


def _replica_devices(config: RLConfig) -> list[tuple[int, ...]]:
    if config.inference is None:
        return []
    tp = config.inference.parallel.tp
    ids = config.inference_gpu_ids
    return [tuple(ids[i : i + tp]) for i in range(0, len(ids), tp)]


def _nodes_per_replica(config: RLConfig) -> int:
    return config.inference.parallel.pp if config.inference is not None else 1


def compute_threads(config: RLConfig, machine: Machine, node: int) -> int:
    """Return the number of compute threads for each process of a node.

    Processes that run at the same time share the cores.
    """
    replicas = len(_replica_devices(config)) if node in config.cluster.inference_node_numbers else 0
    ranks = len(config.trainer_gpu_ids) if node in config.cluster.trainer_node_numbers else 0
    concurrent = max(replicas, ranks) if _alternates(config) else replicas + ranks
    return max(1, machine.cores // max(concurrent, 1))


def _alternates(config: RLConfig) -> bool:
    """Return True if sampling and training never overlap."""
    return config.orchestrator.max_async_level == 0


def fixed_ports(config: RLConfig) -> list[int]:
    """Return the ports of the inference servers of a node, or [] if `inference.server.port` is not set."""
    if config.inference is None or "port" not in config.inference.server.model_fields_set:
        return []
    return [config.inference.server.port + i for i in range(len(_replica_devices(config)))]


def _inference_roles(
    config: RLConfig, plan_nodes: Sequence[PlanNode], *, on_gpu: bool, threads: Sequence[int]
) -> list[Role]:
    """Return the inference servers, node 0 first.

    Servers on node 0 listen on the loopback interface only, because the orchestrator is on node 0, too.
    """
    replicas = _replica_devices(config)
    roles: list[Role] = []
    # a replica that spans several nodes has its server on its first node
    for node in config.cluster.inference_node_numbers[:: _nodes_per_replica(config)] if replicas else ():
        ports = fixed_ports(config) or plan_nodes[node].choose_ports(len(replicas))
        for devices, port in zip(replicas, ports, strict=True):
            env = _device_env(config, devices, on_gpu=on_gpu, threads=threads[node])
            role = _role(config, "inference", len(roles), devices=devices, env=env, port=port)
            roles.append(replace(role, node=node, host=plan_nodes[node].address if node else LOOPBACK))
    return roles


def _trainer_roles(
    config: RLConfig, plan_nodes: Sequence[PlanNode], *, on_gpu: bool, threads: Sequence[int]
) -> list[Role]:
    """Return one process per rank, with the variables that `torchrun` would set on each node."""
    nodes = config.cluster.trainer_node_numbers
    group_env: dict[str, str] = {}
    if config.trainer_ranks > 1:
        first = plan_nodes[nodes[0]]
        group_env = {
            "WORLD_SIZE": str(config.trainer_ranks),
            "LOCAL_WORLD_SIZE": str(len(config.trainer_gpu_ids)),
            "MASTER_ADDR": first.address if len(nodes) > 1 else LOOPBACK,
            "MASTER_PORT": str(first.choose_ports(1)[0]),
        }
        if len(nodes) == 1:
            group_env[STORE_VARIABLE] = secrets.token_hex(16)
    roles: list[Role] = []
    for node in nodes:
        network_env = plan_nodes[node].variables if len(nodes) > 1 else {}
        for device in config.trainer_gpu_ids:
            rank_env = {"RANK": str(len(roles)), "LOCAL_RANK": "0"} if group_env else {}
            env = _device_env(config, (device,), on_gpu=on_gpu, threads=threads[node])
            env["GLIBC_TUNABLES"] = os.environ.get("GLIBC_TUNABLES", KEEP_FREED_MEMORY)
            if on_gpu and not any(name in os.environ for name in _ALLOCATOR):
                env[_ALLOCATOR[0]] = _EXPANDABLE_SEGMENTS
            env |= {**group_env, **rank_env, **network_env}
            role = _role(config, "trainer", len(roles), devices=(device,), env=env)
            roles.append(replace(role, node=node, host=plan_nodes[node].address if node else LOOPBACK))
    return roles


def _turns_env(config: RLConfig) -> dict[str, str]:
    return {TURNS_VARIABLE: config.colocate_offload} if config.colocate is True else {}


def _device_env(config: RLConfig, devices: Sequence[int], *, on_gpu: bool, threads: int) -> dict[str, str]:
    visible = ",".join(map(str, devices)) if on_gpu else ""
    return {
        **_turns_env(config),
        "GOMP_SPINCOUNT": idle_spins(cores_to_itself=_alternates(config)),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # the order in which nvidia-smi numbers the GPUs
        "CUDA_VISIBLE_DEVICES": visible,
        "BUCKEYE_THREADS": str(threads),
        "OMP_NUM_THREADS": str(threads),
    }


_COMMANDS: Mapping[RoleKind, tuple[str, ...]] = {
    "inference": ("serve",),
    "orchestrator": ("worker", "orchestrator"),
    "trainer": ("worker", "trainer"),
}
"""Subcommand of `buckeye` for each kind of process."""


def _role(config: RLConfig, kind: RoleKind, index: int, **details: Any) -> Role:
    """Return a process that reads its configuration. `details` are more fields of the role."""
    config_name = f"{kind}_{index}.json" if kind == "inference" else f"{kind}.json"
    path = str(config.output_dir.absolute() / "configs" / config_name)
    argv = (*PYTHON, "-m", "buckeye", *_COMMANDS[kind], "@", path)
    return Role(kind=kind, index=index, argv=argv, config_name=config_name, **details)


def _check_gpu_ids(config: RLConfig, site: PlanNode) -> None:
    machine = site.machine
    inference_ids = config.inference_gpu_ids if config.inference is not None else []
    for flag, ids in (("inference-gpu-ids", inference_ids), ("trainer-gpu-ids", config.trainer_gpu_ids)):
        absent = ", ".join(str(gpu) for gpu in ids if gpu not in machine.gpus)
        if absent:
            available = ",".join(map(str, machine.gpus)) or "none"
            raise UsageError(
                f"no GPU {absent} on {site.name}; its GPUs: {available}",
                code="BK-DEVICE",
                at=f"--{flag}",
                hint=f"choose among its GPUs, such as `--{flag} {machine.gpus[-1]}`; inference and trainer "
                "may share a GPU"
                if machine.gpus
                else "choose another node (`cluster.trainer_nodes`, `cluster.inference_nodes`)",
            )
