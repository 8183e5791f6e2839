"""Checks that a checkpoint fits the settings of a resumed run, before any process starts."""

from __future__ import annotations

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

    Checks for fewer steps than done, an adapter instead of a complete model or the reverse, and another
    optimizer. The trainer itself checks the rest. `section` prefixes the names of the settings in messages.
    """
    from safetensors import SafetensorError

    state = trainer_state_directory(info)
    misfits: list[str] = []
    for look in (_step_misfits, _weight_misfits, _optimizer_misfits):
        with suppress(OSError, ValueError, KeyError, TypeError, SafetensorError):  # reported elsewhere
            misfits += look(trainer, info.step, state)
    if misfits:
        listed = "\n".join(f"  {section}{line}" for line in misfits)
        raise UsageError(
            f"The checkpoint of step {info.step} cannot be gone on with under these settings:\n{listed}\n"
            "Nothing was started or written. Leave out what was changed, or start a new run in another "
            "--output-dir."
        )


def _step_misfits(trainer: TrainerConfig | SFTConfig, step: int, state: Path) -> Iterator[str]:
    if trainer.max_steps is not None and trainer.max_steps < step:
        yield f"max_steps = {trainer.max_steps}, and it has done {step}. To go back: --ckpt.resume-step N"


def _weight_misfits(trainer: TrainerConfig | SFTConfig, step: int, state: Path) -> Iterator[str]:
    has_adapter = (state / "adapter").is_dir()
    if trainer.model.experimental.lora is not None and not has_adapter:
        yield f"{_LORA}: it holds a complete model and no adapter"
    elif trainer.model.experimental.lora is None and has_adapter:
        yield f"{_LORA}: it holds an adapter and no complete model, and none is set now"


def _optimizer_misfits(trainer: TrainerConfig | SFTConfig, step: int, state: Path) -> Iterator[str]:
    written = {name.rpartition("/")[2].rpartition(".")[0] for name in _optimizer_names(state)} - {""}
    if written - {trainer.optim.type}:
        kinds = ", ".join(sorted(written))
        yield f"optim.type: {kinds} in the checkpoint, {trainer.optim.type} now"


def _optimizer_names(state: Path) -> list[str]:
    """Return the names of optimizer tensors, `<parameter>/<type>.<name>`; none before the first step."""
    from safetensors import safe_open

    names: list[str] = []
    for path in [*(state / "optimizer").glob("*.safetensors"), *state.glob("optimizer.safetensors")]:
        with safe_open(path, "numpy") as file:
            names += file.keys()
    return names
