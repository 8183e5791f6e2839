"""Training that starts from an adapter folder in peft's format: the settings that the folder determines."""

from __future__ import annotations

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
_STORED = {"rank": "r", "alpha": "lora_alpha", "target_modules": "target_modules"}
_OTHER_KINDS = (
    "use_dora",
    "use_rslora",
    "use_qalora",
    "rank_pattern",
    "alpha_pattern",
    "layers_to_transform",
)
"""Keys that, if set, make an adapter differ from W + alpha / rank B A with one rank and alpha."""


def is_adapter(name: str) -> bool:
    """Return True if a model's name is a folder with an adapter in peft's format, and no complete model."""
    folder = Path(name)
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()


def read_base_model(adapter: Path) -> tuple[str, str | None]:
    """Return the name and the revision of an adapter's base model. Raise `UsageError` if the adapter does not
    name it.
    """
    return _base(adapter, _read(adapter))


def start_from_adapter(config: T) -> T:
    """Return the settings of a training with the base model's name, if `model.name` is an adapter folder or
    `model.adapter` is set. With `experimental.lora` the adapter's rank, alpha and modules apply. Other
    settings are returned unchanged.

    Raise `UsageError` if the folder cannot be read, or if settings contradict it.
    """
    if isinstance(config, SFTConfig):
        return config.model_copy(update={"model": start_model(config.model)})
    return config.model_copy(update=_run_changes(config)) if isinstance(config, RLConfig) else config


def _run_changes(config: RLConfig) -> dict[str, Any]:
    """Return the changes to a run's sections, which all name the model."""
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


def start_model(model: ModelConfig) -> ModelConfig:
    """Return a model's settings with those that its adapter determines; unchanged without an adapter. Raise
    `UsageError` if the adapter cannot be read, or if settings contradict it.
    """
    is_named = is_adapter(model.name)
    folder = Path(model.name) if is_named else model.adapter
    if folder is None:
        return model
    content = _read(folder)
    lora = model.experimental.lora
    adapted = None if lora is None else _continued(lora, folder, content)
    changes: dict[str, Any] = {
        "adapter": folder.resolve(),
        "experimental": model.experimental.model_copy(update={"lora": adapted}),
    }
    if is_named:
        changes["name"] = _base(folder, content)[0]
    return model.model_copy(update=changes)


def _continued(lora: LoRAConfig, folder: Path, content: Mapping[str, Any]) -> LoRAConfig:
    """Return the settings for training an adapter further."""
    merge = "Leave experimental.lora out to train the model that it is merged into"
    others = [f"{key} = {content[key]!r}" for key in _OTHER_KINDS if content.get(key)]
    if content.get("peft_type", "LORA") != "LORA":
        others.append(f"peft_type = {content['peft_type']!r}")
    if content.get("bias", "none") != "none":
        others.append(f"bias = {content['bias']!r}")
    if others:
        raise UsageError(
            f"The adapter {folder} cannot be trained further: {', '.join(others)} in its {ADAPTER_CONFIG}. "
            f"{merge}."
        )
    stored = {name: content.get(key) for name, key in _STORED.items()}
    stored["modules_to_save"] = content.get("modules_to_save") or []
    try:
        found = LoRAConfig.model_validate({"dropout": lora.dropout, **stored})
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise UsageError(
            f"The adapter {folder} cannot be trained further: {where} in its {ADAPTER_CONFIG}: "
            f"{problem['msg']}. {merge}."
        ) from None
    wrong = [
        f"{name} = {getattr(lora, name)!r} is set, and the adapter has {getattr(found, name)!r}"
        for name in stored
        if name in lora.model_fields_set and _set(getattr(lora, name)) != _set(getattr(found, name))
    ]
    if wrong:
        raise UsageError(
            f"model.experimental.lora does not fit the adapter {folder}: {'; '.join(wrong)}. Leave these "
            "settings out."
        )
    return found


def _set(value: Any) -> Any:
    return sorted(value) if isinstance(value, list) else value


def _read(adapter: Path) -> Mapping[str, Any]:
    path = adapter / ADAPTER_CONFIG
    try:
        content = read_json(path)
        if not isinstance(content, dict):
            raise ValueError("it is not an object")
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"The adapter {adapter} cannot be read: {path}: {error}.") from None
    return content


def _base(adapter: Path, content: Mapping[str, Any]) -> tuple[str, str | None]:
    base, revision = content.get("base_model_name_or_path"), content.get("revision")
    if not isinstance(base, str) or not base or not isinstance(revision, str | None):
        raise UsageError(
            f"{adapter / ADAPTER_CONFIG} does not name the model that it belongs to: base_model_name_or_path "
            f"is {base!r}, revision is {revision!r}."
        )
    return base, revision
