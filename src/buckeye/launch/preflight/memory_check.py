"""Check that the memory plan fits into this machine, and suggest settings that need less memory."""

from __future__ import annotations

from collections.abc import Sequence

from buckeye.base.disk import human_bytes
from buckeye.config.rl import RLConfig
from buckeye.launch.preflight.check import Check, failed, ok, warning
from buckeye.launch.preflight.devices import Gpu, main_memory
from buckeye.launch.preflight.memory_plan import (
    MAIN_MEMORY,
    Hardware,
    ProcessMemory,
    plan_memory,
    processor_has,
)
from buckeye.launch.preflight.model_shape import ModelShape
from buckeye.launch.preflight.software_checks import uses_vllm
from buckeye.launch.preflight.turns import plan_turns

MEMORY = "memory"
_REMEDIES = (
    "lower --seq-len, --trainer.seq-len, --inference.kv-cache-gb or --inference.gpu-memory-utilization, add "
    "--trainer.model.ac or --trainer.model.experimental.lora, or use a smaller model or more devices"
)


def find_hardware(config: RLConfig, present: Sequence[Gpu]) -> Hardware:
    """Return the devices and memory that a run of this configuration uses on this machine."""
    on_gpu = config.trainer.model.device != "cpu" and bool(present)
    return Hardware(
        memory=main_memory(),
        gpus=tuple(present) if on_gpu else (),
        fast_bfloat16=processor_has("avx512_bf16", "amx_tile"),
        vllm=uses_vllm(config, on_gpu=on_gpu),
    )


def check_memory(config: RLConfig, shape: ModelShape, hardware: Hardware) -> Check:
    """Check that the memory of all processes fits into each GPU and into main memory.

    Return a failure if the total memory is too small, and a warning if only the free memory is too small.
    """
    turns = plan_turns(config, shape, hardware)
    needs = plan_memory(config, shape, hardware) if turns is None else turns.needs
    lines = plan_lines(needs)
    usages = [
        (location, sum_needs(needs, location), *_capacity(location, hardware))
        for location in dict.fromkeys(need.location for need in needs)
    ]
    shortages = [usage for usage in usages if usage[1] > usage[3]]
    seen = "; ".join(
        f"{location}: {human_bytes(need)} needed, {human_bytes(free)} of {human_bytes(total)} free"
        for location, need, total, free in shortages or usages
    )
    if not shortages:
        return ok(MEMORY, seen, lines)
    do = "; ".join(
        f"for {location}: {_REMEDIES}{_describe_users(location, hardware.gpus)}" for location, *_ in shortages
    )
    exceeds_total = any(need > total for _, need, total, _ in shortages)
    return (failed if exceeds_total else warning)(MEMORY, seen, do, lines)


def sum_needs(needs: Sequence[ProcessMemory], location: str) -> int:
    """Return the bytes that all processes need at one location: a GPU or main memory."""
    return sum(need.total for need in needs if need.location == location)


def plan_lines(needs: Sequence[ProcessMemory]) -> list[str]:
    """Return the memory plan as text, one number per line."""
    lines = []
    for need in needs:
        lines.append(f"{need.process}, {need.location}: {human_bytes(need.total)}")
        lines += [f"  {human_bytes(part.size):>9}  {part.what}" for part in need.parts]
    return lines


def _capacity(location: str, hardware: Hardware) -> tuple[int, int]:
    """Return the (total, free) bytes of a device or of main memory; (0, 0) for a missing GPU."""
    if location == MAIN_MEMORY:
        return hardware.memory.total, hardware.memory.free
    name = location.partition(" while ")[0]
    gpu = next((gpu for gpu in hardware.gpus if name == f"GPU {gpu.index}"), None)
    return (gpu.total, gpu.free) if gpu is not None else (0, 0)


def _describe_users(location: str, gpus: Sequence[Gpu]) -> str:
    for gpu in gpus:
        if location == f"GPU {gpu.index}" and gpu.users:
            users = ", ".join(f"{name} ({pid}) uses {human_bytes(size)}" for pid, name, size in gpu.users)
            return f"; {users}"
    return ""
