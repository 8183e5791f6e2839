"""What a checkpoint cannot take over, said before anything is started."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from buckeye.base.storage import read_json
from buckeye.config.sft import SFTConfig
from buckeye.config.trainer import LoRAConfig, TrainerConfig
from buckeye.errors import UsageError
from buckeye.launch.preflight.disk import is_one_of
from buckeye.launch.preflight.model import find_model
from buckeye.transport.checkpoint import CheckpointInfo, trainer_state
from buckeye.transport.checkpoint.base_digest import base_digest

_LORA = "model.experimental.lora"
_SHAPE = (
    "architectures",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
)
"""What of a model's config.json its weights depend on."""
_MOST_TARGETS = 20  # peft writes longer lists in its own way


def refuse_misfit(
    trainer: TrainerConfig | SFTConfig, info: CheckpointInfo, *, section: str = "trainer."
) -> None:
    """Raise UsageError, with every reason, if the trainer could not go on from a checkpoint under these
    settings: another kind or shape of weights, another adapter, another optimizer.

    What cannot be read is left to the trainer. `section` is where its settings are, for messages.
    """
    from safetensors import SafetensorError

    state = trainer_state(info)
    misfits: list[str] = []
    for look in (_step_misfits, _weight_misfits, _optimizer_misfits):
        with suppress(OSError, ValueError, KeyError, TypeError, SafetensorError):  # damaged: others say how
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
    model, lora = find_model(trainer.model.name), trainer.model.experimental.lora
    adapter = state / "adapter"
    if lora is not None and adapter.is_dir():
        yield from _adapter_misfits(lora, adapter, model)
    elif lora is not None:
        yield f"{_LORA}: it holds a complete model and no adapter"
    elif adapter.is_dir():
        yield f"{_LORA}: it holds an adapter and no complete model, and none is set now"
    elif model is not None:
        there, now = read_json(state / "model" / "config.json"), read_json(model / "config.json")
        for key in _SHAPE:
            if key in there and key in now and there[key] != now[key]:
                yield _differ(f"model.name: {key}", there[key], now[key])


def _adapter_misfits(lora: LoRAConfig, adapter: Path, base: Path | None) -> Iterator[str]:
    from safetensors import safe_open

    there = read_json(adapter / "adapter_config.json")
    for name, key, now in (("rank", "r", lora.rank), ("alpha", "lora_alpha", lora.alpha)):
        if there[key] != now:
            yield _differ(f"{_LORA}.{name}", there[key], now)
    targets, wanted = set(there["target_modules"]), set(lora.target_modules)
    if targets != wanted and max(len(targets), len(wanted)) < _MOST_TARGETS:
        yield _differ(f"{_LORA}.target_modules", sorted(targets), sorted(wanted))
    saved = there["modules_to_save"] or []  # full names, of which the setting has the ends
    whole = all(is_one_of(name, lora.modules_to_save) for name in saved)
    if not whole or not all(any(is_one_of(name, [end]) for name in saved) for end in lora.modules_to_save):
        yield _differ(f"{_LORA}.modules_to_save", saved, lora.modules_to_save)
    with safe_open(adapter / "adapter_model.safetensors", "numpy") as file:
        trained_on = (file.metadata() or {}).get("buckeye_base")
    here = base_digest(str(base)) if base is not None else None
    if None not in (trained_on, here) and trained_on != here:
        yield f"model.name: its adapter was trained on other weights than those of {base}"


def _optimizer_misfits(trainer: TrainerConfig | SFTConfig, step: int, state: Path) -> Iterator[str]:
    written = {name.rpartition("/")[2].rpartition(".")[0] for name in _optimizer_names(state)} - {""}
    if written - {trainer.optim.type}:
        yield _differ("optim.type", ", ".join(sorted(written)), trainer.optim.type)


def _optimizer_names(state: Path) -> list[str]:
    """The names of what an optimizer keeps, as `<parameter>/<type>.<name>`; none before its first step."""
    from safetensors import safe_open

    names: list[str] = []
    for path in [*(state / "optimizer").glob("*.safetensors"), *state.glob("optimizer.safetensors")]:
        with safe_open(path, "numpy") as file:
            names += file.keys()
    return names


def _differ(name: str, there: object, now: object) -> str:
    return f"{name}: {there} in the checkpoint, {now} now"
