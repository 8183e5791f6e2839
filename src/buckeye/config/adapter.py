"""Read the settings of a training that starts from an adapter folder in peft's format."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from buckeye.base.storage import read_json
from buckeye.config.rl import RLConfig
from buckeye.config.sft import SFTConfig
from buckeye.config.shared import BaseConfig
from buckeye.config.trainer import LoRAConfig, ModelConfig
from buckeye.errors import UsageError

T = TypeVar("T", bound=BaseConfig)

ADAPTER_CONFIG = "adapter_config.json"
_PEFT_KEYS = {"rank": "r", "alpha": "lora_alpha", "target_modules": "target_modules"}
_UNSUPPORTED_KEYS = (
    *("use_dora", "use_qalora", "use_bdlora", "fan_in_fan_out", "lora_bias", "layer_replication"),
    *("rank_pattern", "alpha_pattern", "exclude_modules", "layers_pattern", "target_parameters"),
    *("trainable_token_indices", "alora_invocation_tokens", "arrow_config", "corda_config", "eva_config"),
    *("kasa_config", "monteclora_config", "loftq_config"),
)
"""Keys of peft for adapters other than W + scale B A with one rank and scale for all modules."""
_INITIALIZATIONS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base model unchanged."""


def is_adapter(name: str) -> bool:
    """Return True if `name` is a folder with an adapter in peft's format and without a complete model."""
    folder = Path(name)
    # Path.is_file raises PermissionError
    return os.path.isfile(folder / ADAPTER_CONFIG) and not os.path.isfile(folder / "config.json")


def read_base_model(adapter: Path) -> tuple[str, str | None]:
    """Return the name and the revision of the base model of an adapter.

    Raise `UsageError` if the adapter does not name it.
    """
    return _base_model(adapter, _read_adapter_config(adapter))


def start_from_adapter(config: T) -> T:
    """Add the settings that the adapter determines, if a training starts from an adapter.

    This is the case if `model.name` is an adapter folder or `model.adapter` is set. The result has the name
    of the base model and, with `experimental.lora`, the rank, alpha and modules of the adapter. Other
    configurations are returned unchanged.

    Raise `UsageError` if the folder cannot be read, or if settings contradict the adapter.
    """
    if isinstance(config, SFTConfig):
        return config.model_copy(update={"model": start_model(config.model)})
    return config.model_copy(update=_run_changes(config)) if isinstance(config, RLConfig) else config


def start_model(model: ModelConfig) -> ModelConfig:
    """Return the settings of a model, with the settings that its adapter determines.

    Without an adapter, the settings are returned unchanged. Raise `UsageError` if the adapter cannot be read,
    or if settings contradict the adapter.
    """
    names_adapter = is_adapter(model.name)
    folder = Path(model.name) if names_adapter else model.adapter
    if folder is None:
        return model
    content = _read_adapter_config(folder)
    lora = model.experimental.lora
    stored_lora = None if lora is None else _lora_settings(lora, folder, content)
    changes: dict[str, Any] = {
        "adapter": folder.resolve(),
        "experimental": model.experimental.model_copy(update={"lora": stored_lora}),
    }
    if names_adapter:
        changes["name"] = _base_model(folder, content)[0]
    return model.model_copy(update=changes)


def _run_changes(config: RLConfig) -> dict[str, Any]:
    """Return the sections of a run to change. Each of them has the name of the model."""
    model = config.trainer.model
    started = start_model(model)
    if started is model:
        return {}
    changes: dict[str, Any] = {"trainer": config.trainer.model_copy(update={"model": started})}
    if config.model is not None:
        changes["model"] = config.model.model_copy(update={"name": started.name})
    for name in ("orchestrator", "inference"):
        section = getattr(config, name)
        if section is not None and section.model.name == model.name:
            named = section.model.model_copy(update={"name": started.name})
            changes[name] = section.model_copy(update={"model": named})
    return changes


def _lora_settings(lora: LoRAConfig, folder: Path, content: Mapping[str, Any]) -> LoRAConfig:
    """Return the settings `experimental.lora` to continue the training of an adapter."""
    failure = f"cannot train the adapter {folder} further: its {ADAPTER_CONFIG} has"
    hint = "leave `experimental.lora` out to merge the adapter into the model and train the model"
    unsupported = [f"{key} = {content[key]!r}" for key in _UNSUPPORTED_KEYS if content.get(key)]
    if content.get("peft_type", "LORA") != "LORA":
        unsupported.append(f"peft_type = {content['peft_type']!r}")
    if content.get("bias", "none") != "none":
        unsupported.append(f"bias = {content['bias']!r}")
    if content.get("init_lora_weights") not in _INITIALIZATIONS:
        unsupported.append(f"init_lora_weights = {content['init_lora_weights']!r}")
    if unsupported:
        raise UsageError(f"{failure} {', '.join(unsupported)}", code="BK-ADAPTER", hint=hint)
    values = {name: content.get(key) for name, key in _PEFT_KEYS.items()}
    values["modules_to_save"] = content.get("modules_to_save") or []
    values["use_rslora"] = bool(content.get("use_rslora"))
    layers = content.get("layers_to_transform")
    values["layers_to_transform"] = [layers] if isinstance(layers, int) else layers
    try:
        stored = LoRAConfig.model_validate({"dropout": lora.dropout, **values})
    except ValidationError as error:
        details = error.errors()[0]
        key = ".".join(map(str, details["loc"]))
        message = f"{failure} an invalid value of {key}: {details['msg']}"
        raise UsageError(message, code="BK-ADAPTER", hint=hint) from None
    differences = [
        f"`{name}` is {getattr(lora, name)!r}, and the adapter has {getattr(stored, name)!r}"
        for name in values
        if name in lora.model_fields_set and _sorted(getattr(lora, name)) != _sorted(getattr(stored, name))
    ]
    if differences:
        raise UsageError(
            f"`model.experimental.lora` does not fit the adapter {folder}: {'; '.join(differences)}",
            code="BK-ADAPTER",
            hint="leave these settings out",
        )
    return stored


def _sorted(value: Any) -> Any:
    return sorted(value) if isinstance(value, list) else value


def _read_adapter_config(adapter: Path) -> Mapping[str, Any]:
    path = adapter / ADAPTER_CONFIG
    try:
        content = read_json(path)
        if not isinstance(content, dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"cannot read the adapter {adapter}: {path}: {error}",
            code="BK-ADAPTER",
            hint=f"name a folder in PEFT format, which has {ADAPTER_CONFIG} and adapter_model.safetensors",
        ) from None
    return content


def _base_model(adapter: Path, content: Mapping[str, Any]) -> tuple[str, str | None]:
    base, revision = content.get("base_model_name_or_path"), content.get("revision")
    if not isinstance(base, str) or not base or not isinstance(revision, str | None):
        raise UsageError(
            f"the adapter does not name its base model: base_model_name_or_path is {base!r}, revision is "
            f"{revision!r}",
            code="BK-ADAPTER",
            at=str(adapter / ADAPTER_CONFIG),
            hint="set `base_model_name_or_path` to the base model",
        )
    return base, revision
