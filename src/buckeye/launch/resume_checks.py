"""Check that a checkpoint matches the settings of a resumed run, before any process starts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from buckeye.config.sft import SFTConfig
from buckeye.config.trainer import TrainerConfig
from buckeye.errors import UsageError
from buckeye.transport.checkpoint import CheckpointInfo, trainer_state_directory

_LORA = "model.experimental.lora"


def check_resumable(
    trainer: TrainerConfig | SFTConfig, info: CheckpointInfo, *, section: str = "trainer."
) -> None:
    """Raise UsageError, with every reason, if the trainer could not resume from a checkpoint.

    The function compares the number of steps, the type of the optimizer, whether an adapter or a complete
    model is trained, and rank and alpha of the adapter if they are set. The trainer checks the rest.
    `section` is the prefix of the names of settings in messages.
    """
    from safetensors import SafetensorError

    state = trainer_state_directory(info)
    problems: list[str] = []
    for check in (_step_problems, _weight_problems, _optimizer_problems):
        with suppress(OSError, ValueError, KeyError, TypeError, SafetensorError):  # the trainer reports it
            problems += check(trainer, info.step, state)
    if problems:
        listed = "\n".join(f"  {section}{line}" for line in problems)
        raise UsageError(
            f"cannot resume from step {info.step}: incompatible settings\n{listed}",
            code="BK-CHECKPOINT-MISMATCH",
            hint="undo these changes, or start a new run in another `--output-dir`; no file was changed",
        )


def _step_problems(trainer: TrainerConfig | SFTConfig, step: int, state: Path) -> Iterator[str]:
    if trainer.max_steps is not None and trainer.max_steps < step:
        yield (
            f"max_steps = {trainer.max_steps}: the checkpoint has {step} finished steps "
            "(to resume from an earlier step: `--ckpt.resume-step N`)"
        )


def _weight_problems(trainer: TrainerConfig | SFTConfig, step: int, state: Path) -> Iterator[str]:
    has_adapter, lora = (state / "adapter").is_dir(), trainer.model.experimental.lora
    if lora is not None and not has_adapter:
        yield f"{_LORA}: the checkpoint has a complete model and no adapter"
    elif lora is None and has_adapter:
        yield f"{_LORA}: not set, but the checkpoint has an adapter and no complete model"
    elif lora is not None:
        recorded = json.loads((state / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
        for name, key in (("rank", "r"), ("alpha", "lora_alpha")):
            if name in lora.model_fields_set and getattr(lora, name) != recorded[key]:
                yield f"{_LORA}.{name} = {getattr(lora, name)}: the checkpoint has {recorded[key]}"


def _optimizer_problems(trainer: TrainerConfig | SFTConfig, step: int, state: Path) -> Iterator[str]:
    from safetensors import safe_open

    names: list[str] = []  # `<parameter>/<type of the optimizer>.<name>`; before the first step, no names
    for path in [*(state / "optimizer").glob("*.safetensors"), *state.glob("optimizer.safetensors")]:
        with safe_open(path, "numpy") as file:
            names += file.keys()
    recorded = {name.rpartition("/")[2].rpartition(".")[0] for name in names} - {""}
    if recorded - {trainer.optim.type}:
        kinds = ", ".join(sorted(recorded))
        yield f"optim.type = {trainer.optim.type}: the checkpoint has the state of {kinds}"
