"""Whether the memory plan fits what is there, and if not, which settings to lower, and to what."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from buckeye.base.disk import human_bytes
from buckeye.config.rl import RLConfig
from buckeye.config.settings import flag_of
from buckeye.config.shared import BaseConfig
from buckeye.config.trainer import ActivationCheckpointConfig, AdamW8bitConfig, LoRAConfig
from buckeye.launch.preflight.check import Check, failed, ok, warning
from buckeye.launch.preflight.devices import Gpu, main_memory
from buckeye.launch.preflight.memory import MAIN, Hardware, ProcessMemory, plan_memory, processor_has_bfloat16
from buckeye.launch.preflight.model import ModelShape
from buckeye.launch.preflight.software import takes_vllm

MEMORY = "memory"
_WORTH = 0.03  # a change that frees less of what a place needs is not proposed
_SHORTEST = 256
_SMALLEST_CACHE_GB = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """Flags that lower the need for memory, and the configuration with them."""

    flags: str
    config: RLConfig


def hardware_of(config: RLConfig, present: Sequence[Gpu]) -> Hardware:
    """Return what a run of this configuration computes with on this machine."""
    on_gpu = config.trainer.model.device != "cpu" and bool(present)
    return Hardware(
        memory=main_memory(),
        gpus=tuple(present) if on_gpu else (),
        fast_bfloat16=processor_has_bfloat16(),
        vllm=takes_vllm(config, on_gpu=on_gpu),
    )


def check_memory(config: RLConfig, shape: ModelShape, hardware: Hardware) -> Check:
    """Compare what all processes in each place need with what it has: too little in all is a failure, too
    little at the moment a warning."""
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
    do = "; ".join(dict.fromkeys(_advice(config, shape, hardware, place) for place, *_ in short))
    never = any(need > total for _, need, total, _ in short)
    return (failed if never else warning)(MEMORY, seen, do, lines)


def with_length(config: RLConfig, tokens: int) -> RLConfig:
    """A copy of a configuration whose rollouts have at most so many tokens."""
    changed = with_value(config, "orchestrator.seq_len", tokens)
    changed = with_value(changed, "trainer.seq_len", tokens)
    if changed.inference is not None:
        changed = with_value(changed, "inference.model.max_model_len", tokens)
    return changed


def needed(needs: Sequence[ProcessMemory], place: str) -> int:
    """Bytes that all processes need in a place."""
    return sum(need.total for need in needs if need.place == place)


def plan_lines(needs: Sequence[ProcessMemory]) -> list[str]:
    """The plan, a number a line."""
    lines = []
    for need in needs:
        lines.append(f"{need.process}, {need.place}: {human_bytes(need.total)}")
        lines += [f"  {human_bytes(part.size):>9}  {part.what}" for part in need.parts]
    return lines


def _summary(need: int, total: int, free: int) -> str:
    return f"{human_bytes(need)} needed, {human_bytes(total)} there, {human_bytes(free)} of it free"


def _room(place: str, hardware: Hardware) -> tuple[int, int]:
    """(all, free) bytes of a place; a GPU that is not there has none."""
    if place == MAIN:
        return hardware.memory.total, hardware.memory.free
    gpu = next((gpu for gpu in hardware.gpus if place == f"GPU {gpu.index}"), None)
    return (gpu.total, gpu.free) if gpu is not None else (0, 0)


def _advice(config: RLConfig, shape: ModelShape, hardware: Hardware, place: str) -> str:
    """The first settings, one after the other, with which a place has room enough."""
    free = _room(place, hardware)[1]
    chosen: list[str] = []
    present = config
    need = needed(plan_memory(present, shape, hardware), place)
    for step in _STEPS:
        for remedy in step(present, hardware):
            lower = needed(plan_memory(remedy.config, shape, hardware), place)
            if lower > need * (1 - _WORTH):
                continue
            if chosen and chosen[-1].split()[0] == remedy.flags.split()[0]:
                chosen.pop()  # the same setting, lower still
            chosen.append(remedy.flags)
            present, need = remedy.config, lower
            if need <= free:
                return f"for {place}: {' '.join(chosen)}, which needs {human_bytes(need)}"
    tried = f" (with {' '.join(chosen)} it still needs {human_bytes(need)})" if chosen else ""
    users = _users(place, hardware.gpus)
    return f"for {place}: a smaller model, or more devices{tried}{users}"


def _users(place: str, gpus: Sequence[Gpu]) -> str:
    for gpu in gpus:
        if place == f"GPU {gpu.index}" and gpu.users:
            held = ", ".join(f"{name} ({pid}) holds {human_bytes(size)}" for pid, name, size in gpu.users)
            return f"; {held}"
    return ""


# --- what can be lowered, in the order in which it costs least ---


def _remedy(config: RLConfig, path: str, value: object, written: str = "") -> Remedy:
    return Remedy(flags=flag_of([path]) + written, config=with_value(config, path, value))


def _smaller_cache(config: RLConfig, hardware: Hardware) -> Iterator[Remedy]:
    if config.inference is None:
        return
    if hardware.vllm and hardware.gpus:
        share = config.inference.gpu_memory_utilization
        while share > 0.2:
            share = round(share - 0.1, 2)
            yield _remedy(config, "inference.gpu_memory_utilization", share, f" {share:g}")
        return
    size = 16.0
    while size > _SMALLEST_CACHE_GB:
        size = round(size / 2, 3)
        yield _remedy(config, "inference.kv_cache_gb", size, f" {size:g}")


def _shorter_rows(config: RLConfig, _hardware: Hardware) -> Iterator[Remedy]:
    """Rows as long as the longest rollout: they need not be longer."""
    longest = config.orchestrator.seq_len
    if longest < config.trainer.seq_len:
        yield _remedy(config, "trainer.seq_len", longest, f" {longest}")


def _recompute(config: RLConfig, _hardware: Hardware) -> Iterator[Remedy]:
    if config.trainer.model.ac is None:
        yield _remedy(config, "trainer.model.ac", ActivationCheckpointConfig())


def _small_moments(config: RLConfig, hardware: Hardware) -> Iterator[Remedy]:
    divided = config.trainer_ranks > 1 or config.trainer.model.sharding == "full"
    if config.trainer.optim.type == "adamw" and hardware.gpus and not divided:
        yield _remedy(config, "trainer.optim", AdamW8bitConfig(lr=config.trainer.optim.lr), ".type adamw8bit")


def _shorter_rollouts(config: RLConfig, _hardware: Hardware) -> Iterator[Remedy]:
    length = config.orchestrator.seq_len
    while length >= 2 * _SHORTEST:
        length //= 2
        yield Remedy(flags=f"--seq-len {length}", config=with_length(config, length))


def _adapters(config: RLConfig, _hardware: Hardware) -> Iterator[Remedy]:
    if config.trainer.model.experimental.lora is None:
        yield _remedy(config, "trainer.model.experimental.lora", LoRAConfig())


_STEPS: tuple[Callable[[RLConfig, Hardware], Iterator[Remedy]], ...] = (
    _shorter_rows,
    _smaller_cache,
    _recompute,
    _small_moments,
    _shorter_rollouts,
    _adapters,
)


def with_value(config: RLConfig, path: str, value: object) -> RLConfig:
    """A copy of a configuration with another value under a dotted key; other settings are not looked at."""

    def changed(section: BaseConfig, keys: Sequence[str]) -> BaseConfig:
        new = value if len(keys) == 1 else changed(getattr(section, keys[0]), keys[1:])
        return section.model_copy(update={keys[0]: new})

    copy = changed(config, path.split("."))
    assert isinstance(copy, RLConfig)
    return copy
