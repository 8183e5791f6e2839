"""The machine of a run, and its division into devices for inference and training."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from buckeye.base.process import usable_cores
from buckeye.errors import UsageError
from buckeye.launch.preflight.devices import GpuSpec, this_machine
from buckeye.launch.preflight.devices import gpus as present_gpus

_SMALL = 20_000_000  # parameters of a model that two cores train in minutes


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingMachine:
    """A machine for a run.

    `gpus` are the GPUs to use, or None, and `ids` their device ids there. `name` is its name in the plan.
    `problem` is the reason why it is not available, for a plan that is only shown.
    """

    name: str
    gpus: GpuSpec | None
    ids: tuple[int, ...] = ()
    cores: int = 1
    remote: bool = False
    problem: str | None = None

    def layout(self, parameters: int) -> GpuLayout | None:
        """Return the layout of the GPUs for a model of this size, or None without GPUs.

        Raises UsageError if the model does not fit.
        """
        if self.gpus is None:
            return None
        planned = plan_gpus(self.gpus, parameters)
        if not self.ids:
            return planned
        return replace(
            planned,
            inference=tuple(self.ids[i] for i in planned.inference),
            trainer=tuple(self.ids[i] for i in planned.trainer),
        )


def local_machine(asked: GpuSpec | None) -> TrainingMachine:
    """Return this machine with all its GPUs, or with the requested ones.

    If it does not have those, the result has a `problem`.
    """
    visible = this_machine().gpus
    here = [gpu for gpu in present_gpus() if gpu.index in visible]
    cores = usable_cores()
    kind = here[0].name if here else ""
    memory = min((gpu.total for gpu in here), default=0) / 1e9 or 80.0
    if asked is None:
        gpus = GpuSpec(len(visible), memory_gb=memory) if visible else None
        return TrainingMachine(name="this machine", gpus=gpus, ids=visible, cores=cores)
    if len(visible) >= asked.count and _is_type(kind, asked.type):
        gpus = replace(asked, memory_gb=memory)
        return TrainingMachine(name="this machine", gpus=gpus, ids=visible[: asked.count], cores=cores)
    there = f"{len(visible)} x {kind or 'GPU'}" if visible else f"no GPU, and {cores} cores"
    use = "use them all" if visible else "train on the cores (fit for a small model)"
    problem = (
        f"--gpus {asked}: this machine has {there}. Either\n"
        f"  rent them:     add --provider prime\n"
        f"  a host of yours: add --provider ssh --host USER@HOST\n"
        f"  or {use}: leave --gpus out"
    )
    return TrainingMachine(name=f"{asked}, which are not here", gpus=asked, cores=cores, problem=problem)


def remote_machine(provider: str, asked: GpuSpec | None, hosts: list[str]) -> TrainingMachine:
    """Return a remote machine. Raises UsageError if flags to find one are missing."""
    if provider == "prime":
        if asked is None:
            raise UsageError("--provider prime: which GPUs? Add --gpus, as --gpus 2xA100")
        if not asked.type:
            raise UsageError(f"--provider prime: {asked} of which type? Write both, as --gpus 2xA100")
        if hosts:
            raise UsageError("--host is for a machine of yours: --provider ssh")
        return TrainingMachine(name=f"{asked}, rented from Prime Intellect", gpus=asked, remote=True)
    if not hosts:
        raise UsageError("--provider ssh: which host? Add --host USER@HOST")
    return TrainingMachine(name=f"{', '.join(hosts)}, by ssh", gpus=asked, remote=True)


def devices_text(machine: TrainingMachine, layout: GpuLayout | None, parameters: int) -> str:
    """Return which devices sample and which train, as text."""
    if layout is None:
        if machine.remote:
            return "without --gpus it is taken for a machine without any"
        size = "takes long here; without a GPU up to 20 million parameters are sensible"
        return f"{machine.cores} cores, no GPU" + (f": this model {size}" if parameters > _SMALL else "")
    if layout.is_shared:
        return f"GPU {_ids(layout.inference)} samples and trains"
    tp = f" ({layout.tp} hold one copy)" if layout.tp > 1 else ""
    return f"GPU {_ids(layout.inference)} sample{tp}, GPU {_ids(layout.trainer)} train"


def _ids(ids: tuple[int, ...]) -> str:
    if len(ids) > 2 and ids == tuple(range(ids[0], ids[0] + len(ids))):
        return f"{ids[0]}-{ids[-1]}"
    return ",".join(map(str, ids))


def _is_type(name: str, wanted: str) -> bool:
    """Return True if a GPU named like `NVIDIA GeForce RTX 4090` is of a type like RTX4090_24GB."""
    short = wanted.rpartition("_")[0] if "_" in wanted else wanted
    return short.replace("_", "").lower() in name.replace(" ", "").replace("-", "").lower()


_TRAINED_BYTES = 16  # per parameter: weights, gradients and AdamW's two moments in float32
_CAST_BYTES = 2  # per parameter: a copy in bfloat16, of layers that are gathered whole
_SERVED_BYTES = 2
_TRAINER_ROOM = 0.75  # share of a GPU's memory; activations and logits take the rest
_ENGINE_ROOM = 0.6  # share for weights; keys and values of rollouts take the rest
_SHARED_ROOM = 0.4  # share for the engine if one GPU samples and trains
_TRAINING_SHARE = 4  # at least one GPU in this many trains


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuLayout:
    """Device ids of inference and of the trainer.

    `tp` GPUs hold one copy of the model for sampling. `lora` is True if only adapters fit. One GPU may be in
    both lists.
    """

    inference: tuple[int, ...]
    trainer: tuple[int, ...]
    tp: int = 1
    lora: bool = False

    @property
    def is_shared(self) -> bool:
        """True if sampling and training take turns on a GPU."""
        return bool(set(self.inference) & set(self.trainer))


def plan_gpus(gpus: GpuSpec, parameters: int) -> GpuLayout:
    """Return the division of `gpus` for a model with this number of parameters.

    A single GPU does both. Of several, the trainer gets a quarter (of 8: 6 sample, 2 train), or as many as
    the model needs. Raises UsageError, with a remedy, for a model that does not fit even with adapters.
    """
    memory = gpus.memory_gb * 1e9
    if gpus.count == 1:
        return _one(parameters, memory, gpus)
    least = math.ceil(_SERVED_BYTES * parameters / (_ENGINE_ROOM * memory))
    tp = 1 << max(0, least - 1).bit_length()  # attention heads can be divided among 1, 2, 4 or 8 GPUs
    for lora in (False, True):
        least = math.ceil(_trained_bytes(parameters, lora=lora) / (_TRAINER_ROOM * memory))
        train = max(least, gpus.count // _TRAINING_SHARE, 1)
        sample = (gpus.count - train) // tp * tp
        if sample > 0:
            return GpuLayout(
                inference=tuple(range(sample)), trainer=tuple(range(sample, gpus.count)), tp=tp, lora=lora
            )
    raise UsageError(_too_large(parameters, gpus, tp))


def _one(parameters: int, memory: float, gpus: GpuSpec) -> GpuLayout:
    if _SERVED_BYTES * parameters > _SHARED_ROOM * memory:
        raise UsageError(_too_large(parameters, gpus, 1))
    full = _trained_bytes(parameters, lora=False) <= (1 - _SHARED_ROOM) * _TRAINER_ROOM * memory
    return GpuLayout(inference=(0,), trainer=(0,), lora=not full)


def _trained_bytes(parameters: int, *, lora: bool) -> int:
    return parameters * (_CAST_BYTES if lora else _TRAINED_BYTES + _CAST_BYTES)


def _too_large(parameters: int, gpus: GpuSpec, tp: int) -> str:
    needed = max(2, tp + math.ceil(_CAST_BYTES * parameters / (_TRAINER_ROOM * gpus.memory_gb * 1e9)))
    needs = f"{needed}x{gpus.type}" if gpus.type else f"{needed} such GPUs"
    return (
        f"{parameters / 1e9:.3g} billion parameters do not fit on {gpus} ({gpus.memory_gb:g} GB each), not "
        f"even with adapters. That takes at least {needs} (--gpus); or take a smaller model (--model)"
    )
