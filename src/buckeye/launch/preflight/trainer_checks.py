"""Checks before a start for errors that a trainer would raise only after it has loaded its model."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from buckeye.base.user_function import find_missing_function
from buckeye.config.rl import RLConfig
from buckeye.config.shared import UserFunctionConfig
from buckeye.errors import InferenceError
from buckeye.inference.engine.architecture import read_model_config, tensor_shapes
from buckeye.launch.preflight.disk import matches_module_name
from buckeye.trainer.model.trainable import untrainable_reasons

_OUTER_MODULES = ("embed_tokens", "lm_head")  # not hidden layers


def trainer_warnings(config: RLConfig, model_path: Path | None, *, on_gpu: bool) -> list[str]:
    """Return one line per setting that the trainer would reject.

    Also reports a model that it cannot train, and functions of the user that do not exist. Parameter names
    are those in the model's files, so a model that is not on this machine is not checked.
    """
    warnings = [*_function_warnings(config), *_sharding_warnings(config, on_gpu=on_gpu)]
    if model_path is not None:
        with suppress(InferenceError):  # the check of the model reports a missing configuration
            reasons = untrainable_reasons(read_model_config(model_path / "config.json"))
            warnings += [f"model.name: {model_path}/config.json: {reason}" for reason in reasons]
    shapes = tensor_shapes(model_path) if model_path is not None else {}
    lora = config.trainer.model.experimental.lora
    if shapes and lora is not None:
        matrices = [name.rpartition(".")[0] for name, shape in shapes.items() if len(shape) == 2]
        warnings += _target_warnings(lora.target_modules, matrices)
    return warnings


def _function_warnings(config: RLConfig) -> Iterator[str]:
    shaping = config.orchestrator.reward_shaping
    sections = {
        "trainer.loss": config.trainer.loss,
        "orchestrator.advantage": config.orchestrator.advantage,
        "orchestrator.reward_shaping.function": shaping.function if shaping is not None else None,
    }
    for name, section in sections.items():
        missing = (
            find_missing_function(section.import_path) if isinstance(section, UserFunctionConfig) else None
        )
        if missing is not None:
            yield f"{name}.import_path: {missing}"


def _sharding_warnings(config: RLConfig, *, on_gpu: bool) -> Iterator[str]:
    """Yield an error if the model would be sharded, and the optimizer does not support shards.

    The configuration already rejects this for forced sharding; the result of `auto` depends on the devices.
    """
    model = config.trainer.model
    is_model_sharded = (
        on_gpu and model.device != "cpu" and (config.trainer_ranks > 1 or model.fsdp_cpu_offload)
    )
    if config.trainer.optim.type == "adamw8bit" and model.sharding == "auto" and is_model_sharded:
        yield (
            "trainer.optim.type: adamw8bit does not support a model that is sharded over GPUs; set "
            'trainer.model.sharding = "none", or use adamw'
        )


def _target_warnings(targets: Collection[str], matrices: Collection[str]) -> Iterator[str]:
    hidden = [name for name in matrices if name.rpartition(".")[2] not in _OUTER_MODULES]
    missing = [
        target for target in targets if not any(matches_module_name(name, [target]) for name in hidden)
    ]
    if missing or not targets:
        kinds = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in hidden))
        yield (
            f"trainer.model.experimental.lora.target_modules: {', '.join(missing) or 'an empty list'} "
            f"does not match a hidden linear layer of the model (it has {kinds})"
        )
