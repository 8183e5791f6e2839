"""The machine of a run, and its division into devices for inference and training."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from buckeye.base.columns import counted
from buckeye.base.process import usable_cores
from buckeye.errors import UsageError
from buckeye.launch.preflight.devices import Gpu, GpuSpec, this_machine
from buckeye.launch.preflight.devices import gpus as present_gpus
from buckeye.launch.preflight.forecast import TRAINED_BYTES

_MAX_PARAMETERS_ON_CPU = 20_000_000  # two cores train such a model in minutes
_CAST_BYTES = 2  # per parameter: the weights in bfloat16, for the computation
_SERVED_BYTES = 2
_TRAINER_ROOM = 0.75  # share of a GPU's memory; activations and logits take the rest
_ENGINE_ROOM = 0.6  # share for weights; keys and values of rollouts take the rest
_SHARED_ROOM = 0.4  # share for the engine if one GPU samples and trains
_TRAINING_SHARE = 4  # of n GPUs, at least n // 4 train


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingMachine:
    """A machine for a run.

    `gpus` are the GPUs to use, or None, and `ids` their device ids. `name` is its name in the plan.
    `problem` is the error if the machine lacks the requested GPUs; `--dry-run` still shows the plan.
    """

    name: str
    gpus: GpuSpec | None
    ids: tuple[int, ...] = ()
    cores: int = 1
    remote: bool = False
    problem: UsageError | None = None

    def layout(self, parameters: int) -> GpuLayout | None:
        """Return the layout of the GPUs for a model of this size, or None without GPUs.

        Raises UsageError if the model does not fit.
        """
        if self.gpus is None:
            return None
        layout = plan_gpus(self.gpus, parameters)
        if not self.ids:
            return layout
        return replace(
            layout,
            inference=tuple(self.ids[i] for i in layout.inference),
            trainer=tuple(self.ids[i] for i in layout.trainer),
        )


def local_machine(requested: GpuSpec | None) -> TrainingMachine:
    """Return this machine with all its GPUs, or with the requested ones.

    If this machine lacks the requested GPUs, the result has a `problem`.
    """
    visible = this_machine().gpus
    gpus = [gpu for gpu in present_gpus() if gpu.index in visible]
    cores = usable_cores()
    kind = gpus[0].name if gpus else ""
    memory = min((gpu.total for gpu in gpus), default=0) / 1e9 or 80.0
    if requested is None:
        spec = GpuSpec(len(visible), memory_gb=memory) if visible else None
        return TrainingMachine(name="this machine", gpus=spec, ids=visible, cores=cores)
    if len(visible) >= requested.count and _is_type(kind, requested.type):
        spec = replace(requested, memory_gb=memory)
        return TrainingMachine(name="this machine", gpus=spec, ids=visible[: requested.count], cores=cores)
    problem = UsageError(
        f"--gpus {requested}: this machine has "
        + (f"{len(visible)} x {kind or 'GPU'}" if visible else f"no GPU, and {counted(cores, 'core')}"),
        code="BK-DEVICE",
        hint="Use one of\n"
        "  rented GPUs:   add --provider prime\n"
        "  your host:     add --provider ssh --host USER@HOST\n"
        f"  this machine:  leave --gpus out{'' if visible else ' (trains on the CPU: small models only)'}",
    )
    name = f"{requested}, not on this machine"
    return TrainingMachine(name=name, gpus=requested, cores=cores, problem=problem)


def remote_machine(provider: str, requested: GpuSpec | None, hosts: list[str]) -> TrainingMachine:
    """Return a remote machine. Raises UsageError if flags to find one are missing."""
    if provider == "prime":
        hint = "Add number and type: --gpus 2xA100"
        if requested is None:
            raise UsageError("--provider prime: needs --gpus", code="BK-CLI-MISSING", hint=hint)
        if not requested.type:
            message = f"--provider prime: --gpus {requested.count} has no type"
            raise UsageError(message, code="BK-CLI-MISSING", hint=hint)
        if hosts:
            raise UsageError(
                "--host and --provider prime exclude each other",
                code="BK-CLI-CONFLICT",
                hint="For your own host, use --provider ssh",
            )
        name = f"{requested}, rented from Prime Intellect"
        return TrainingMachine(name=name, gpus=requested, remote=True)
    if not hosts:
        hint = "Add --host USER@HOST"
        raise UsageError("--provider ssh: needs --host", code="BK-CLI-MISSING", hint=hint)
    return TrainingMachine(name=f"{', '.join(hosts)}, by ssh", gpus=requested, remote=True)


def planned_gpus(machine: TrainingMachine) -> list[Gpu]:
    """Return the GPUs of a machine for a forecast, as if they were present and unused."""
    spec = machine.gpus
    if spec is None or not spec.type:
        return [] if spec is None or machine.remote else present_gpus()
    size = int(spec.memory_gb * 1e9)
    return [Gpu(index=i, name=spec.type, total=size, free=size) for i in machine.ids or range(spec.count)]


def devices_text(machine: TrainingMachine, layout: GpuLayout | None, parameters: int) -> str:
    """Return a text that names the devices for sampling and the devices for training."""
    if layout is None:
        if machine.remote:
            return "no GPU, because --gpus is not given"
        is_slow = parameters > _MAX_PARAMETERS_ON_CPU
        advice = ": slow for this model; use up to 20 million parameters without a GPU" if is_slow else ""
        return f"{counted(machine.cores, 'core')}, no GPU{advice}"
    if layout.is_shared:
        return f"GPU {_ids(layout.inference)} samples and trains"
    tp = f" ({layout.tp} per copy of the model)" if layout.tp > 1 else ""
    return f"GPU {_ids(layout.inference)} sample{tp}, GPU {_ids(layout.trainer)} train"


def _ids(ids: tuple[int, ...]) -> str:
    if len(ids) > 2 and ids == tuple(range(ids[0], ids[0] + len(ids))):
        return f"{ids[0]}-{ids[-1]}"
    return ",".join(map(str, ids))


def _is_type(name: str, wanted: str) -> bool:
    """Return True if a GPU named like `NVIDIA GeForce RTX 4090` is of a type like RTX4090_24GB."""
    short = wanted.rpartition("_")[0] if "_" in wanted else wanted
    return short.replace("_", "").lower() in name.replace(" ", "").replace("-", "").lower()


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

    A single GPU samples and trains. Of several GPUs, a quarter train (2 of 8), or more if the model needs
    more. Raises UsageError, with a remedy, for a model that does not fit even with adapters.
    """
    memory = gpus.memory_gb * 1e9
    if gpus.count == 1:
        if _SERVED_BYTES * parameters > _SHARED_ROOM * memory:
            raise _too_large_error(parameters, gpus, 1)
        full = _trained_bytes(parameters, lora=False) <= (1 - _SHARED_ROOM) * _TRAINER_ROOM * memory
        return GpuLayout(inference=(0,), trainer=(0,), lora=not full)
    min_gpus = math.ceil(_SERVED_BYTES * parameters / (_ENGINE_ROOM * memory))
    tp = 1 << max(0, min_gpus - 1).bit_length()  # attention heads can be divided among 1, 2, 4 or 8 GPUs
    for lora in (False, True):
        min_gpus = math.ceil(_trained_bytes(parameters, lora=lora) / (_TRAINER_ROOM * memory))
        train = max(min_gpus, gpus.count // _TRAINING_SHARE, 1)
        sample = (gpus.count - train) // tp * tp
        if sample > 0:
            return GpuLayout(
                inference=tuple(range(sample)), trainer=tuple(range(sample, gpus.count)), tp=tp, lora=lora
            )
    raise _too_large_error(parameters, gpus, tp)


def _trained_bytes(parameters: int, *, lora: bool) -> int:
    return parameters * (_CAST_BYTES if lora else TRAINED_BYTES + _CAST_BYTES)


def _too_large_error(parameters: int, gpus: GpuSpec, tp: int) -> UsageError:
    needed = max(2, tp + math.ceil(_CAST_BYTES * parameters / (_TRAINER_ROOM * gpus.memory_gb * 1e9)))
    needs = f"{needed}x{gpus.type}" if gpus.type else f"{needed} such GPUs"
    return UsageError(
        f"{parameters / 1e9:.3g} billion parameters do not fit on {gpus} ({gpus.memory_gb:g} GB each), even "
        "with adapters",
        code="BK-MEMORY",
        hint=f"Use at least {needs} (--gpus), or a smaller model (--model)",
    )
