"""How GPUs are shared out between sampling and training for a model."""

from __future__ import annotations

import math
from dataclasses import dataclass

from buckeye.errors import UsageError
from buckeye.sizing.devices import Gpus

_TRAINED_BYTES = 16  # of a parameter: weights, gradients and AdamW's two moments in float32
_CAST_BYTES = 2  # and a copy in bfloat16, of layers that are gathered whole
_SERVED_BYTES = 2
_TRAINER_ROOM = 0.75  # of a GPU's memory, beside activations and logits
_ENGINE_ROOM = 0.6  # beside the keys and values of rollouts
_SHARED_ROOM = 0.4  # where one GPU does both
_TRAINING_SHARE = 4  # one GPU of so many trains at least


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuLayout:
    """Device ids of inference and of the trainer. `tp` GPUs hold one copy of the model for sampling. `lora`:
    only adapters fit. One GPU may be in both lists."""

    inference: tuple[int, ...]
    trainer: tuple[int, ...]
    tp: int = 1
    lora: bool = False

    @property
    def shared(self) -> bool:
        """Whether sampling and training take turns on a GPU."""
        return bool(set(self.inference) & set(self.trainer))


def plan_gpus(gpus: Gpus, parameters: int) -> GpuLayout:
    """How `gpus` are shared out for a model of so many parameters.

    One GPU does both; of more the trainer gets a quarter (of 8: 6 sample, 2 train), or as many as the model
    needs. Raises UsageError for a model that does not even fit with adapters, with what would do.
    """
    memory = gpus.memory_gb * 1e9
    if gpus.count == 1:
        return _one(parameters, memory, gpus)
    tp = _power_of_two(math.ceil(_SERVED_BYTES * parameters / (_ENGINE_ROOM * memory)))
    for lora in (False, True):
        least = math.ceil(_trained_bytes(parameters, lora=lora) / (_TRAINER_ROOM * memory))
        train = max(least, gpus.count // _TRAINING_SHARE, 1)
        sample = (gpus.count - train) // tp * tp
        if sample > 0:
            return GpuLayout(
                inference=tuple(range(sample)),
                trainer=tuple(range(sample, gpus.count)),
                tp=tp,
                lora=lora,
            )
    raise UsageError(_too_large(parameters, gpus, tp))


def _one(parameters: int, memory: float, gpus: Gpus) -> GpuLayout:
    if _SERVED_BYTES * parameters > _SHARED_ROOM * memory:
        raise UsageError(_too_large(parameters, gpus, 1))
    full = _trained_bytes(parameters, lora=False) <= (1 - _SHARED_ROOM) * _TRAINER_ROOM * memory
    return GpuLayout(inference=(0,), trainer=(0,), lora=not full)


def _trained_bytes(parameters: int, *, lora: bool) -> int:
    return parameters * (_CAST_BYTES if lora else _TRAINED_BYTES + _CAST_BYTES)


def _power_of_two(least: int) -> int:
    """Attention heads can be shared out to 1, 2, 4, 8 GPUs."""
    return 1 << max(0, least - 1).bit_length()


def _too_large(parameters: int, gpus: Gpus, tp: int) -> str:
    needed = max(2, tp + math.ceil(_CAST_BYTES * parameters / (_TRAINER_ROOM * gpus.memory_gb * 1e9)))
    needs = f"{needed}x{gpus.type}" if gpus.type else f"{needed} such GPUs"
    return (
        f"{parameters / 1e9:.3g} billion parameters do not fit on {gpus} ({gpus.memory_gb:g} GB each), not "
        f"even with adapters. That takes at least {needs} (--gpus); or take a smaller model (--model)"
    )
