"""Plan of a run whose engine and trainer take turns on one device.

While one of them works, the other one keeps only what the device has room for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from buckeye.base.disk import human_bytes
from buckeye.base.turns import Turns
from buckeye.config.rl import RLConfig
from buckeye.launch.preflight.check import Check, ok, skipped
from buckeye.launch.preflight.forecast import Part
from buckeye.launch.preflight.memory_plan import Hardware, ProcessMemory, plan_memory, slot_bytes
from buckeye.launch.preflight.model_shape import ModelShape

TURNS = "colocate"
_USABLE_SHARE = 0.95
# bytes for activations of a prompt and for libraries, as in inference/engine/kv_cache.py
_RESERVE = 2 * 2**30
_KEPT = ("weights (float32)", "frozen weights", "reference model", "optimizer", "program")
"""Beginnings of the parts of the trainer's memory that stay in use between steps."""
_OPTIMIZER = "optimizer"
_WEIGHTS, _CACHE = "weights", "keys and values"


def choose_colocation(config: RLConfig, gpu_ids: Sequence[int]) -> RLConfig:
    """Replace `colocate` = "auto" by true or false. `gpu_ids` are the GPUs of this machine.

    It becomes true if there is one GPU, if no setting names another device, and if no setting requires that
    sampling and training overlap.
    """
    if config.colocate != "auto":
        return config
    separate = config.model_copy(update={"colocate": False})
    inference, orchestrator = config.inference, config.orchestrator
    if (
        inference is None
        or len(gpu_ids) != 1
        or "cpu" in (inference.model.device, config.trainer.model.device)
    ):
        return separate
    ids = list(gpu_ids)
    names = ("inference_gpu_ids", "trainer_gpu_ids")
    chosen = [getattr(config, name) for name in names if name in config.model_fields_set]
    limits = [env.max_concurrent for env in (*orchestrator.env, *orchestrator.evaluation_environments)]
    overlaps = orchestrator.max_async_level and "max_async_level" in orchestrator.model_fields_set
    if any(value != ids for value in chosen) or any(limits) or overlaps:
        return separate
    synchronous = {"max_async_level": 0}
    shared = config.model_copy(
        update={
            **dict.fromkeys(names, ids),
            **synchronous,
            "colocate": True,
            "orchestrator": orchestrator.model_copy(update=synchronous),
            "trainer": config.trainer.model_copy(update=synchronous),
        }
    )
    return separate if shared.colocation_obstacle else shared


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnsPlan:
    """Memory of both turns on a GPU, what moves to main memory, and the bytes of the KV cache.

    The first of the `needs` is that of the engine while it samples.
    """

    turns: Turns
    kv_cache: int
    needs: Sequence[ProcessMemory]
    gpu: str
    total: int

    def size(self, turn: str) -> int:
        """Return the bytes that both processes need on the GPU in a turn, "sampling" or "training"."""
        return sum(need.total for need in self.needs if need.location == f"{self.gpu} while {turn}")

    def describe(self) -> str:
        """Return the plan as one line."""
        return (
            f"{self.gpu} ({human_bytes(self.total)}): {human_bytes(self.size('sampling'))} while sampling, "
            f"with a KV cache of {human_bytes(self.kv_cache)}; {human_bytes(self.size('training'))} while "
            f"training; moved to main memory: {self.turns.setting}"
        )


def plan_turns(config: RLConfig, shape: ModelShape, hardware: Hardware) -> TurnsPlan | None:
    """Return the plan of a colocated run on a GPU, or None for another run."""
    gpu = next((gpu for gpu in hardware.gpus if gpu.index == config.inference_gpu_ids[0]), None)
    if config.colocate is not True or gpu is None or config.inference is None:
        return None
    name, inference = f"GPU {gpu.index}", config.inference
    tensors = replace(hardware, vllm=False)  # vLLM's plan has one part for its whole share of the memory
    needs = plan_memory(config, shape, tensors)
    engine = next(need for need in needs if need.location == name and need.process.startswith("inference"))
    trainer = next(need for need in needs if need.location == name and need.process.startswith("trainer"))
    moments = _sum(trainer.parts, _OPTIMIZER)
    kept = _sum(trainer.parts, *_KEPT) - moments
    weights = _sum(engine.parts, _WEIGHTS)
    room = int(_USABLE_SHARE * gpu.total)
    asleep = _sum(engine.parts, "program")
    cacheless = [part for part in engine.parts if part.what != _CACHE and not part.what.startswith("new")]
    free = room - kept - sum(part.size for part in cacheless) - _RESERVE
    width = 2 if inference.model.dtype != "float32" else 4
    length = min(inference.model.max_model_len or shape.max_positions, shape.max_positions)
    slot = slot_bytes(shape, length, width)
    rollouts = min(inference.max_num_seqs, config.orchestrator.max_concurrent_rollouts)
    offload = config.colocate_offload
    if offload == "auto":
        moves_weights = trainer.total + asleep + weights > room
        still_too_large = trainer.total + asleep > room
        turns = Turns(
            weights=moves_weights, optimizer=still_too_large or free - moments < slot * rollouts // 2
        )
    else:
        turns = Turns(weights=offload in ("weights", "both"), optimizer=offload in ("optimizer", "both"))
    if inference.kv_cache_gb is not None:
        cache = int(1e9 * inference.kv_cache_gb)
    else:
        cache = min(free - (0 if turns.optimizer else moments), 2 * inference.max_num_seqs * slot)
        cache = max(cache, slot)
    training = [part for part in trainer.parts if not (turns.optimizer and part.what.startswith(_OPTIMIZER))]
    idle = [part for part in training if part.what.startswith(_KEPT)]
    kept_by_engine = ("program",) if turns.weights else ("program", _WEIGHTS)
    resting = [part for part in engine.parts if part.what in kept_by_engine]
    return TurnsPlan(
        turns=turns,
        kv_cache=cache,
        gpu=name,
        total=gpu.total,
        needs=[
            _need(engine, "sampling", [*cacheless, Part(f"{_CACHE}, or new weights", max(cache, weights))]),
            _need(trainer, "sampling", idle),
            _need(engine, "training", resting),
            _need(trainer, "training", training),
            *(need for need in plan_memory(config, shape, hardware) if need.location != name),
        ],
    )


def settle_turns(config: RLConfig, shape: ModelShape | None, hardware: Hardware) -> RLConfig:
    """Return a colocated configuration with the decisions of the plan: `colocate_offload` and the KV cache.

    An explicit size of the cache keeps the trainer's memory out of the memory profile of vLLM.
    """
    assert config.inference is not None
    plan = None if shape is None else plan_turns(config, shape, hardware)
    if plan is None:
        unknown = config.colocate_offload == "auto"
        return config.model_copy(update={"colocate_offload": "none"}) if unknown else config
    awake = plan.needs[0].total
    inference = config.inference.model_copy(
        update={
            "kv_cache_gb": plan.kv_cache / 1e9,
            "gpu_memory_utilization": min(0.95, round(awake / plan.total, 2)),
        }
    )
    return config.model_copy(update={"colocate_offload": plan.turns.setting, "inference": inference})


def settle_cache(config: RLConfig, shape: ModelShape | None, hardware: Hardware) -> RLConfig:
    """Return the configuration with the size of vLLM's KV cache if the trainer uses one of its GPUs.

    Both start together. Without an explicit size, vLLM would count memory of the trainer as its own.
    """
    inference = config.inference
    shared = {*config.inference_gpu_ids} & {*config.trainer_gpu_ids}
    totals = [gpu.total for gpu in hardware.gpus if gpu.index in shared]
    if shape is None or inference is None or not totals or not hardware.vllm or inference.kv_cache_gb:
        return config
    width = 4 if inference.model.dtype == "float32" else 2
    weights = width * shape.parameters // inference.parallel.tp
    length = min(inference.model.max_model_len or shape.max_positions, shape.max_positions)
    room = int(inference.gpu_memory_utilization * min(totals)) - weights - _RESERVE
    cache = max(room, slot_bytes(shape, length, width))
    settled = inference.model_copy(update={"kv_cache_gb": cache / 1e9})
    return config.model_copy(update={"inference": settled})


def check_turns(config: RLConfig, shape: ModelShape | None, hardware: Hardware) -> list[Check]:
    """Report the turns of a colocated run."""
    if not hardware.gpus:
        return [ok(TURNS, "engine and trainer take turns on the CPU; nothing moves")]
    if shape is None:
        return [skipped(TURNS, "the sizes of the model are unknown until it is downloaded")]
    plan = plan_turns(config, shape, hardware)
    return [] if plan is None else [ok(TURNS, plan.describe())]


def _sum(parts: Sequence[Part], *names: str) -> int:
    return sum(part.size for part in parts if part.what.startswith(names))


def _need(need: ProcessMemory, turn: str, parts: Sequence[Part]) -> ProcessMemory:
    return replace(need, location=f"{need.location} while {turn}", parts=tuple(parts))
