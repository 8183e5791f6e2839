"""What a trainer would refuse once its model is loaded, found before it is started."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from buckeye.base.own_function import missing_function
from buckeye.config.losses import LossConfig
from buckeye.config.rl import RLConfig
from buckeye.config.shared import OwnFunctionConfig
from buckeye.errors import InferenceError
from buckeye.inference.engine.architecture import read_config
from buckeye.launch.preflight.model import find_model
from buckeye.trainer.model.trainable import untrainable


def trainer_warnings(config: RLConfig, model_path: Path | None, *, on_gpu: bool) -> list[str]:
    """Return a line for each setting that the trainer of a run will refuse, a model that it cannot train, and
    a function of the user's that is not there."""
    found = [*_own_functions(config), *_sharding_warnings(config, on_gpu=on_gpu)]
    if model_path is not None:
        with suppress(InferenceError):  # no configuration at all: the check of the model says so
            refused = untrainable(read_config(model_path / "config.json"))
            found += [f"model.name: {model_path}/config.json: {reason}" for reason in refused]
    return found


def reference_warnings(loss: LossConfig) -> list[str]:
    """Whether the trainer will have to fetch the model that the loss compares with."""
    if loss.reference_model is None or find_model(loss.reference_model) is not None:
        return []
    return [f"trainer.loss.reference_model: the weights of {loss.reference_model} are not on this machine"]


def _own_functions(config: RLConfig) -> Iterator[str]:
    shaping = config.orchestrator.reward_shaping
    sections = {
        "trainer.loss": config.trainer.loss,
        "orchestrator.advantage": config.orchestrator.advantage,
        "orchestrator.reward_shaping.function": shaping.function if shaping is not None else None,
    }
    for name, section in sections.items():
        missing = missing_function(section.import_path) if isinstance(section, OwnFunctionConfig) else None
        if missing is not None:
            yield f"{name}.import_path: {missing}"


def _sharding_warnings(config: RLConfig, *, on_gpu: bool) -> Iterator[str]:
    """Forced sharding is an error of the configuration; whether `auto` divides is known with the devices."""
    model = config.trainer.model
    divides = on_gpu and model.device != "cpu" and (config.trainer_ranks > 1 or model.fsdp_cpu_offload)
    if config.trainer.optim.type == "adamw8bit" and model.sharding == "auto" and divides:
        yield (
            "trainer.optim.type: adamw8bit cannot update a model that is divided among GPUs; set "
            'trainer.model.sharding = "none", or use adamw'
        )
