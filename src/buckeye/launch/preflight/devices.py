"""GPUs of this machine with their memory and processes, main memory, and the names of GPU types."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from buckeye.base.process import run_program, usable_cores
from buckeye.config.problems import closest, did_you_mean
from buckeye.config.rl import RLConfig
from buckeye.errors import UsageError

log = logging.getLogger(__name__)

_QUERY_SECONDS = 20.0
_MIB = 2**20
_CGROUP = Path("/sys/fs/cgroup")
_CGROUP_FILES = (  # (limit, used): version 2, then version 1
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
_GPU_TYPES = """
    H100_80GB H200_141GB H200_96GB GH200_96GB GH200_480GB GH200_624GB B200_180GB B300_262GB
    A100_80GB A100_40GB L40S_48GB L40_48GB A40_48GB A30_24GB A10_24GB L4_24GB T4_16GB P100_16GB
    P40_24GB V100_32GB V100_16GB A6000_48GB A5000_24GB A4500_20GB A4000_16GB RTX6000Ada_48GB
    RTX5000Ada_32GB RTX4000Ada_20GB RTX2000Ada_16GB RTX5090_32GB RTX4090_24GB RTX4080_16GB
    RTX3090_24GB RTX3080_10GB RTX6000_24GB RTX8000_48GB RTX_PRO_6000B_96GB
"""
GPU_MEMORY_GB = {name: int(name.rpartition("_")[2].removesuffix("GB")) for name in _GPU_TYPES.split()}
GPU_MEMORY_GB |= {"GH200_480GB": 96, "GH200_624GB": 141}
"""Memory of one GPU in GB (10^9 bytes), by the full type name that providers use.

The number in the name GH200_480GB or GH200_624GB includes memory of the CPU; the value here does not.
"""

_DEFAULT_SIZES = {"H200": "H200_141GB", "GH200": "GH200_96GB", "A100": "A100_80GB", "V100": "V100_32GB"}
_GPU_SPEC = re.compile(r"(?:(?P<count>\d+)\s*[xX*]\s*)?(?P<type>[A-Za-z][\w ]*)|(?P<alone>\d+)", re.ASCII)
_MAX_GPUS = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Cores and GPUs of a machine, for a plan. `gpus` are the CUDA device ids that a run may use."""

    cores: int
    gpus: tuple[int, ...]


def this_machine() -> Machine:
    """Return the resources of this machine. In a container, only cores of the container count."""
    return Machine(cores=usable_cores(), gpus=_visible_gpus())


def _visible_gpus() -> tuple[int, ...]:
    if shutil.which("nvidia-smi") is None:
        if list(Path("/dev").glob("nvidia[0-9]*")):
            log.warning("Found a GPU, but no `nvidia-smi` in PATH: continuing without a GPU")
        return ()
    try:
        listing = _query("--query-gpu=index")
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("`nvidia-smi` failed: continuing without a GPU: %s", error)
        return ()
    installed = tuple(int(line) for line in listing.split() if line.isdigit())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return installed
    parts = [part.strip() for part in visible.split(",") if part.strip()]
    if not all(part.lstrip("-").isdigit() for part in parts):
        raise UsageError(
            f"CUDA_VISIBLE_DEVICES={visible} has entries that are not numbers",
            code="BK-DEVICE",
            hint="list GPUs by their numbers, as in CUDA_VISIBLE_DEVICES=0,1",
        )
    allowed = {int(part) for part in parts}
    return tuple(gpu for gpu in installed if gpu in allowed)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A GPU. `index` is its number in nvidia-smi. `total` and `free` are bytes of memory.

    `users` are the processes on the GPU, as (pid, name, bytes). The driver may hide the pid.
    """

    index: int
    name: str
    total: int
    free: int
    users: tuple[tuple[str, str, int], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class MainMemory:
    """Total and available bytes of main memory, of this machine or this container."""

    total: int
    free: int


def main_memory(cgroup: Path = _CGROUP) -> MainMemory:
    """Return the machine's memory, or the container's limit if that is lower."""
    machine = psutil.virtual_memory()
    total, free = machine.total, machine.available
    for limit_file, used_file in _CGROUP_FILES:
        limit, used = _number(cgroup / limit_file), _number(cgroup / used_file)
        if limit is not None and limit < total:
            total = limit
            free = min(free, limit - (used or 0))
    return MainMemory(total=total, free=max(0, free))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # the cgroup does not exist, or has no limit ("max")
        return None


def cpu_slots_warning(config: RLConfig, present: Collection[object]) -> str | None:
    """Return a warning if the user set GPU ids on a machine without GPUs.

    On such a machine, an id is the number of a CPU slot. All CPU slots share the cores of the machine.
    """
    names = ("inference_gpu_ids", "trainer_gpu_ids")
    # Buckeye may set the inference ids from the number of replicas. So inference ids that equal the default
    # are not evidence that the user set them.
    is_default = getattr(config, names[0]) == RLConfig.model_fields[names[0]].default
    chosen = [
        name for name in names if name in config.model_fields_set and (name == names[1] or not is_default)
    ]
    if present or not chosen or config.trainer.model.device == "cpu" or config.colocate is True:
        return None
    ids = "; ".join(f"{name} = {getattr(config, name)}" for name in chosen)
    return f"no GPU found: the ids are CPU slots, which share the cores of this machine ({ids})"


def gpus() -> list[Gpu]:
    """Return the GPUs of this machine, or [] if nvidia-smi is missing or fails."""
    if shutil.which("nvidia-smi") is None:
        return []
    apps = ""
    try:
        listing = _query("--query-gpu=index,uuid,name,memory.total,memory.free")
        with suppress(OSError, subprocess.SubprocessError):
            apps = _query("--query-compute-apps=gpu_uuid,pid,process_name,used_memory")
    except (OSError, subprocess.SubprocessError):
        return []
    return read_gpus(listing, apps)


def read_gpus(listing: str, apps: str) -> list[Gpu]:
    """Return the GPUs from two tables of nvidia-smi, `listing` of GPUs and `apps` of processes.

    The format of both tables is `csv,noheader,nounits`. A GPU without its own memory reports no sizes. It has
    those of main memory.
    """
    memory = main_memory()
    users: dict[str, list[tuple[str, str, int]]] = {}
    for uuid, pid, name, used in _rows(apps, 4):
        users.setdefault(uuid, []).append((pid, name, _mib(used, 0)))
    return [
        Gpu(
            index=int(index),
            name=name,
            total=_mib(total, memory.total),
            free=_mib(free, memory.free),
            users=tuple(users.get(uuid, ())),
        )
        for index, uuid, name, total, free in _rows(listing, 5)
    ]


def _mib(text: str, unknown: int) -> int:
    """Return the bytes of a number of MiB, or `unknown` if the driver does not report it ("[N/A]")."""
    return int(text) * _MIB if text.isdigit() else unknown


def _rows(table: str, columns: int) -> list[Sequence[str]]:
    rows = [[cell.strip() for cell in line.split(",")] for line in table.splitlines()]
    return [row for row in rows if len(row) == columns]


def _query(query: str) -> str:
    """Return a table of nvidia-smi. Raises OSError and `subprocess.SubprocessError`."""
    result = run_program(["nvidia-smi", query, "--format=csv,noheader,nounits"], seconds=_QUERY_SECONDS)
    result.check_returncode()
    return result.stdout


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """`count` GPUs with `memory_gb` each (10^9 bytes).

    `type` is a full name such as H100_80GB, or "" for any type.
    """

    count: int
    type: str = ""
    memory_gb: float = 80

    def __str__(self) -> str:
        return (
            f"{self.count}x{self.type}" if self.type else f"{self.count} GPU{'s' if self.count > 1 else ''}"
        )


def parse_gpu_spec(text: str) -> GpuSpec:
    """Parse a number and a type of GPUs, such as `4xH100`, `H100` (one GPU) or `4` (any type).

    A type without its memory means the usual size: A100 is A100_80GB. Raises UsageError for other texts, and
    suggests similar types.
    """
    match = _GPU_SPEC.fullmatch(text.strip())
    if match is None:
        raise _spec_error(text, "not a number and a type of GPUs", "write, for example, --gpus 4xH100")
    count = int(match["alone"] or match["count"] or 1)
    if not 1 <= count <= _MAX_GPUS:
        raise _spec_error(text, f"{count} is outside of 1 to {_MAX_GPUS}", "choose another number of GPUs")
    if match["alone"]:
        return GpuSpec(count)
    name = _full_name(match["type"], text)
    return GpuSpec(count, name, GPU_MEMORY_GB[name])


def short_name(gpu_type: str) -> str:
    """Return the name of a GPU type without its memory: A100 for A100_80GB."""
    return gpu_type.rpartition("_")[0]


def _full_name(gpu_type: str, text: str) -> str:
    name = gpu_type.strip().replace(" ", "_")
    by_name = {known.lower(): known for known in GPU_MEMORY_GB}
    by_name |= {short_name(known).lower(): known for known in reversed(GPU_MEMORY_GB)}
    by_name |= {short.lower(): full for short, full in _DEFAULT_SIZES.items()}
    full_name = by_name.get(name.lower())
    if full_name is not None:
        return full_name
    suggestion = did_you_mean(list(dict.fromkeys(by_name[close] for close in closest(name, by_name)))).strip()
    hint = suggestion or "write, for example, 4xH100, 2xA100_80GB or 1xRTX4090"
    raise _spec_error(text, f"unknown GPU type {gpu_type.strip()!r}", hint)


def _spec_error(text: str, problem: str, hint: str) -> UsageError:
    return UsageError(f"--gpus {text}: {problem}", code="BK-CLI-ARGUMENT", hint=hint)
