"""Find errors before a run starts that a trainer would raise only after it has loaded its model."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from buckeye.base.user_function import find_missing_function
from buckeye.config.losses import LossConfig
from buckeye.config.rl import RLConfig
from buckeye.config.shared import UserFunctionConfig
from buckeye.errors import InferenceError, UsageError
from buckeye.inference.engine.architecture import read_model_config, tensor_shapes
from buckeye.inference.engine.general_spec import (
    GeneralSpec,
    linear_modules,
    read_served_spec,
    target_problem,
    unroundable_reason,
)
from buckeye.inference.engine.model_fields import is_4bit, is_rounded
from buckeye.inference.engine.tensor_layout import EMBED, HEAD
from buckeye.launch.preflight.disk import matches_module_name
from buckeye.launch.preflight.model import find_model
from buckeye.launch.preflight.model_files import ADAPTER_WEIGHTS, check_adapter_files
from buckeye.trainer.data.chat_data import check_first_chat
from buckeye.trainer.model.trainable import length_problem, unpacked_reasons, untrainable_reasons
from buckeye.transport.checkpoint.base_digest import base_digest, read_base_digest

_TARGETS = "trainer.model.experimental.lora.target_modules"
_OUTER_MODULES = ("embed_tokens", "lm_head")  # not hidden layers


def trainer_warnings(config: RLConfig, model_path: Path | None, *, on_gpu: bool) -> list[str]:
    """Return one line per setting that the trainer would reject.

    Also report a model that the trainer cannot train, and functions of the user that do not exist. The names
    of parameters come from the files of the model, so only a local model is checked.
    """
    warnings = [
        *_function_warnings(config),
        *_data_warnings(config),
        *_sharding_warnings(config, on_gpu=on_gpu),
    ]
    if model_path is not None:
        with suppress(InferenceError):  # the check of the model reports a missing configuration
            content = read_model_config(model_path / "config.json")
            reasons = untrainable_reasons(content)
            if not reasons and config.trainer.model.sharding != "none" and _is_sharded(config, on_gpu=on_gpu):
                reasons = [
                    f"{reason}: such a model cannot be sharded; set trainer.model.sharding to none"
                    for reason in unpacked_reasons(content)
                ]
            warnings += [f"model.name: {model_path}/config.json: {reason}" for reason in reasons]
            warnings += _length_warnings(config, content)
    shapes = tensor_shapes(model_path) if model_path is not None else {}
    lora = config.trainer.model.experimental.lora
    stored = read_model_config(model_path / "config.json") if model_path is not None else {}
    quantized = is_4bit(stored)
    if quantized and lora is None:
        warnings.append(
            "trainer.model.experimental.lora: the weights of the model have 4 bits, so only an adapter can "
            "be trained: set experimental.lora"
        )
    if config.trainer.model.quantization is not None and model_path is not None:
        warnings += _quantization_warnings(config, model_path, on_gpu=on_gpu)
    if shapes and lora is not None and model_path is not None:
        warnings += _target_warnings(lora.target_modules, _linear_modules(model_path, shapes))
        has_experts = any("expert" in key for key in stored)
        problem = target_problem(model_path, lora.target_modules) if has_experts else None
        warnings += [] if problem is None else [f"{_TARGETS}: {problem}"]
        tied = [name for name in lora.modules_to_save if name.rpartition(".")[2] in _OUTER_MODULES]
        if tied and EMBED in shapes and HEAD not in shapes:
            warnings.append(
                f"trainer.model.experimental.lora.modules_to_save: {', '.join(tied)} cannot be "
                "trained in full: input and output embedding are one matrix"
            )
    if config.trainer.model.adapter is not None and model_path is not None and not quantized:
        warnings += _adapter_warnings(config.trainer.model.adapter, config.trainer.model.name)
    return warnings


def reference_warnings(loss: LossConfig) -> list[str]:
    """Return [LINE] if the trainer must download the reference model of the loss, else []."""
    if loss.reference_model is None or find_model(loss.reference_model) is not None:
        return []
    return [f"trainer.loss.reference_model: {loss.reference_model} is not on this machine: it is downloaded"]


def _quantization_warnings(config: RLConfig, model_path: Path, *, on_gpu: bool) -> Iterator[str]:
    """Yield the reasons why the trainer cannot round the weights of the model."""
    where, lora = "trainer.model.quantization", config.trainer.model.experimental.lora
    if importlib.util.find_spec("bitsandbytes") is None:
        yield f"{where}: bitsandbytes is not installed: install the extra `optim8bit`"
    with suppress(InferenceError):  # the check of the model reports it
        reason = unroundable_reason(model_path, read_served_spec(model_path))
        if reason is not None:
            yield f"{where}: {reason}"
    if config.trainer.model.sharding == "auto" and _is_sharded(config, on_gpu=on_gpu):
        yield f'{where}: rounded weights cannot be sharded over GPUs: set trainer.model.sharding to "none"'
    rounded = [f".{name}." for name in tensor_shapes(model_path) if is_rounded(name)]
    modules = [] if lora is None else lora.modules_to_save
    full = [module for module in modules if any(f".{module}." in name for name in rounded)]
    if full:
        yield (
            f"trainer.model.experimental.lora.modules_to_save: {', '.join(full)} cannot be trained in full: "
            "model.quantization rounds these weights"
        )


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


def _length_warnings(config: RLConfig, model_config: Mapping[str, Any]) -> Iterator[str]:
    """Yield an error if rollouts or conversations may be too long for the model."""
    lengths = {"orchestrator.seq_len": config.orchestrator.seq_len}
    if config.trainer.supervised is not None:
        lengths["trainer.seq_len"] = config.trainer.seq_len
    problems = (length_problem(model_config, length, setting) for setting, length in lengths.items())
    yield from filter(None, problems)


def _data_warnings(config: RLConfig) -> Iterator[str]:
    """Yield an error if the file of `trainer.supervised` cannot be read, or its first line is not a chat."""
    if config.trainer.supervised is not None:
        try:
            check_first_chat(config.trainer.supervised.path, "trainer.supervised.path")
        except UsageError as error:
            yield f"trainer.supervised.path: {error.message}"


def _sharding_warnings(config: RLConfig, *, on_gpu: bool) -> Iterator[str]:
    """Yield an error if the trainer would shard the model, but the optimizer does not support shards.

    The configuration rejects this when `sharding` is "full". With "auto", the devices of this machine decide.
    """
    is_sharded = config.trainer.model.sharding == "auto" and _is_sharded(config, on_gpu=on_gpu)
    if config.trainer.optim.type == "adamw8bit" and is_sharded:
        yield (
            "trainer.optim.type: adamw8bit does not support a model that is sharded over GPUs; set "
            'trainer.model.sharding = "none", or use adamw'
        )


def _is_sharded(config: RLConfig, *, on_gpu: bool) -> bool:
    """Return True if the trainer would shard the model, unless `sharding` is "none"."""
    model = config.trainer.model
    return on_gpu and model.device != "cpu" and (config.trainer_ranks > 1 or model.fsdp_cpu_offload)


def _adapter_warnings(adapter: Path, model: str) -> Iterator[str]:
    """Yield the reason why the trainer cannot start from an adapter, if there is one.

    It is damaged, its matrices do not fit the model, or it was trained on other weights. If the adapter does
    not record a digest of the weights that it was trained on, only its tensors are checked.
    """
    where = "trainer.model.adapter"
    try:
        check_adapter_files(adapter, Path(model))
        recorded = read_base_digest(adapter / ADAPTER_WEIGHTS)
    except UsageError as error:
        yield f"{where}: {error.message}"
        return
    except (OSError, ValueError) as error:
        yield f"{where}: {adapter}: cannot read the adapter: {error}"
        return
    if None not in (recorded, base_digest(model)) and recorded != base_digest(model):
        other = f"was trained on other weights than {model}: set model.name to its base model"
        yield f"{where}: {adapter} {other}"


def _linear_modules(model_path: Path, shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """Return the names of the hidden linear layers of a model. Experts and routers are not linear layers."""
    with suppress(InferenceError):  # the check of the model reports it
        if isinstance(read_served_spec(model_path), GeneralSpec):
            return linear_modules(model_path)
    matrices = [name.rpartition(".")[0] for name, shape in shapes.items() if len(shape) == 2]
    others = (*_OUTER_MODULES, "gate")
    return [n for n in matrices if n.rpartition(".")[2] not in others and ".experts." not in n]


def _target_warnings(targets: Collection[str], hidden: Collection[str]) -> Iterator[str]:
    missing = [
        target for target in targets if not any(matches_module_name(name, [target]) for name in hidden)
    ]
    if missing or not targets:
        kinds = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in hidden))
        yield (
            f"{_TARGETS}: {', '.join(missing) or 'an empty list'} "
            f"does not match a hidden linear layer of the model (it has {kinds})"
        )
