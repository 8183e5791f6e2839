"""Comparison of the memory plan with the memory of this machine, with settings that need less."""

from __future__ import annotations

from collections.abc import Sequence

from buckeye.base.disk import human_bytes
from buckeye.config.rl import RLConfig
from buckeye.launch.preflight.check import Check, failed, ok, warning
from buckeye.launch.preflight.devices import Gpu, main_memory
from buckeye.launch.preflight.memory import MAIN, Hardware, ProcessMemory, plan_memory, processor_has_bfloat16
from buckeye.launch.preflight.model import ModelShape
from buckeye.launch.preflight.software import takes_vllm

MEMORY = "memory"
_REMEDIES = (
    "lower --seq-len, --trainer.seq-len, --inference.kv-cache-gb or --inference.gpu-memory-utilization, add "
    "--trainer.model.ac or --trainer.model.experimental.lora, or take a smaller model or more devices"
)


def hardware_of(config: RLConfig, present: Sequence[Gpu]) -> Hardware:
    """Return the devices and memory that a run of this configuration uses on this machine."""
    on_gpu = config.trainer.model.device != "cpu" and bool(present)
    return Hardware(
        memory=main_memory(),
        gpus=tuple(present) if on_gpu else (),
        fast_bfloat16=processor_has_bfloat16(),
        vllm=takes_vllm(config, on_gpu=on_gpu),
    )


def check_memory(config: RLConfig, shape: ModelShape, hardware: Hardware) -> Check:
    """Compare the memory that all processes need with what each device, and main memory, has.

    Too little total memory is a failure; too little free memory is a warning.
    """
    needs = plan_memory(config, shape, hardware)
    lines = plan_lines(needs)
    states = {place: _room(place, hardware) for place in dict.fromkeys(need.place for need in needs)}
    short = []
    for place, (total, free) in states.items():
        need = needed(needs, place)
        if need > free:
            short.append((place, need, total, free))
    if not short:
        rooms = (f"{place}: {_summary(needed(needs, place), *room)}" for place, room in states.items())
        return ok(MEMORY, "; ".join(rooms), lines)
    seen = "; ".join(f"{place}: {_summary(need, total, free)}" for place, need, total, free in short)
    do = "; ".join(_advice(place, hardware.gpus) for place, *_ in short)
    never = any(need > total for _, need, total, _ in short)
    return (failed if never else warning)(MEMORY, seen, do, lines)


def needed(needs: Sequence[ProcessMemory], place: str) -> int:
    """Return the bytes that all processes need on one device, or in main memory."""
    return sum(need.total for need in needs if need.place == place)


def plan_lines(needs: Sequence[ProcessMemory]) -> list[str]:
    """Return the memory plan as text, one number per line."""
    lines = []
    for need in needs:
        lines.append(f"{need.process}, {need.place}: {human_bytes(need.total)}")
        lines += [f"  {human_bytes(part.size):>9}  {part.what}" for part in need.parts]
    return lines


def _summary(need: int, total: int, free: int) -> str:
    return f"{human_bytes(need)} needed, {human_bytes(total)} there, {human_bytes(free)} of it free"


def _room(place: str, hardware: Hardware) -> tuple[int, int]:
    """Return the (total, free) bytes of a device or of main memory; (0, 0) for a missing GPU."""
    if place == MAIN:
        return hardware.memory.total, hardware.memory.free
    gpu = next((gpu for gpu in hardware.gpus if place == f"GPU {gpu.index}"), None)
    return (gpu.total, gpu.free) if gpu is not None else (0, 0)


def _advice(place: str, gpus: Sequence[Gpu]) -> str:
    return f"for {place}: {_REMEDIES}{_users(place, gpus)}"


def _users(place: str, gpus: Sequence[Gpu]) -> str:
    for gpu in gpus:
        if place == f"GPU {gpu.index}" and gpu.users:
            held = ", ".join(f"{name} ({pid}) holds {human_bytes(size)}" for pid, name, size in gpu.users)
            return f"; {held}"
    return ""
