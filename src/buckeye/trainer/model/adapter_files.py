"""Saving, loading and merging of LoRA adapters in peft's format."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from buckeye.base.distribution import need
from buckeye.errors import BuckeyeError, CheckpointError, UsageError
from buckeye.inference.engine.model_fields import is_4bit
from buckeye.trainer.model.trainable import model_load_error
from buckeye.trainer.output.hf_directory import read_tokenizer_files, save_model, write_tokenizer_files
from buckeye.transport.checkpoint.base_digest import BASE_DIGEST_KEY, base_digest

logger = logging.getLogger(__name__)

ADAPTER_NAME = "default"
"""Name of the adapter in the model. Files do not contain this name."""
ADAPTER_DIRECTORY = "adapter"
"""Name of the adapter's directory in the trainer's directory of a checkpoint."""
WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
_PREFIX = "base_model.model."
"""Prefix of parameter names in peft's files."""
_HINT = f"name a folder in PEFT format, with {CONFIG_FILE} and {WEIGHTS_FILE}"
_MUST_AGREE = ("r", "lora_alpha", "target_modules", "modules_to_save", "use_rslora", "layers_to_transform")


def has_adapter(model: PreTrainedModel) -> bool:
    """Return True if an adapter is trained and all other weights are frozen."""
    return hasattr(model, "peft_config")


def save_weights(
    model: PreTrainedModel,
    tokenizer: Mapping[str, bytes],
    directory: Path,
    *,
    dtype: torch.dtype,
    tensors: Mapping[str, Tensor],
) -> None:
    """Write the adapter if the model has one, else the model as `dtype`.

    `tensors` are the unsharded trained tensors, by name.
    """
    if has_adapter(model):
        save_adapter(model, tokenizer, directory, tensors=tensors)
    else:
        save_model(model, tokenizer, directory, dtype=dtype, tensors=tensors)


def save_adapter(
    model: PreTrainedModel, tokenizer: Mapping[str, bytes], directory: Path, *, tensors: Mapping[str, Tensor]
) -> None:
    """Write the adapter of `model` and the tokenizer's files to `directory`, as float32.

    `tensors` are the unsharded trained parameters, by name.
    """
    directory.mkdir(parents=True, exist_ok=True)
    stored = {
        stored_name(name): tensor.detach().to("cpu", torch.float32).contiguous()
        for name, tensor in tensors.items()
    }
    config = _adapter_config(model)
    digest = base_digest(config["base_model_name_or_path"])
    metadata = {"format": "pt", **({BASE_DIGEST_KEY: digest} if digest is not None else {})}
    save_file(stored, directory / WEIGHTS_FILE, metadata=metadata)
    content = json.dumps(config, indent=2, sort_keys=True)
    (directory / CONFIG_FILE).write_text(content + "\n", encoding="utf-8")
    write_tokenizer_files(directory, tokenizer)


def read_adapter(model: PreTrainedModel, directory: Path) -> dict[str, Tensor]:
    """Return the values of the adapter of `model` from a directory, whole, by the names of the parameters.

    Raise `CheckpointError` if rank, scale or modules of the two adapters differ. Raise `UsageError` if the
    adapter was trained on another base model.
    """
    try:
        content = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
        stored = load_file(directory / WEIGHTS_FILE)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"the adapter in {directory} cannot be read: {error}", code="BK-ADAPTER", hint=_HINT
        ) from error
    config = _adapter_config(model)
    differing = [key for key in _MUST_AGREE if _comparable(content.get(key)) != _comparable(config[key])]
    if differing:
        pairs = ", ".join(f"{key} is {config[key]}, recorded {content.get(key)}" for key in differing)
        raise CheckpointError(
            f"the adapter in {directory} does not fit the settings: {pairs}",
            code="BK-ADAPTER",
            hint="set trainer.model.experimental.lora to the recorded values, or start a new run",
        )
    targets = {stored_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    if targets.keys() != stored.keys() or any(stored[n].shape != p.shape for n, p in targets.items()):
        raise CheckpointError(
            f"the adapter in {directory} belongs to another base model: its tensors differ in name or shape",
            code="BK-ADAPTER",
            hint="set model.name to the base model of the adapter, or start a new run",
        )
    check_adapter_base(directory, config["base_model_name_or_path"])
    return {name: stored[stored_name(name)] for name, p in model.named_parameters() if p.requires_grad}


def merge_adapter(base: str, adapter: Path, out: Path) -> None:
    """Merge `adapter` into the model `base` (a hub name or a directory), and write the model to `out`.

    The sum is computed in float32, and stored in the dtype of the base model. Raise `UsageError` if the base
    model or the adapter cannot be loaded.
    """
    try:
        config = AutoConfig.from_pretrained(base)
        dtype = config.dtype or torch.float32
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        if is_4bit(config.to_dict()):
            need("bitsandbytes", "a model with weights in 4 bits")
            model = model.dequantize(dtype=torch.float32)
            model._weight_conversions = None  # of the 4-bit files, which saving would apply in reverse
            logger.warning(
                "The weights of %s have 4 bits; the merged model has them, rounded, plus the adapter, as %s",
                base,
                dtype,
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise model_load_error(base, error) from error
    merge_adapter_into(model, base, adapter)
    save_model(model, read_tokenizer_files(base), out, dtype=dtype)


def merge_adapter_into(model: PreTrainedModel, base: str, adapter: Path) -> None:
    """Add an adapter to the weights of `model`, which was loaded from `base`.

    Afterwards all weights of the model are trainable.

    Raise `UsageError` if the adapter cannot be read, or does not fit the model.
    """
    from peft import PeftModel, get_peft_model_state_dict  # the import takes seconds
    from peft.tuners.tuners_utils import BaseTunerLayer

    try:
        adapted = PeftModel.from_pretrained(model, str(adapter))
        # peft adds a copy of an adapted embedding
        stored = {
            name: tensor
            for name, tensor in load_file(adapter / WEIGHTS_FILE).items()
            if not name.endswith(".base_layer.weight")
        }
        check_adapter_base(adapter, base)
        expected = get_peft_model_state_dict(adapted, save_embedding_layers=False).keys()
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        if ends[0].weight is ends[1].weight and any(isinstance(end, BaseTunerLayer) for end in ends):
            raise ValueError("it changes one of input and output embedding, which are one matrix")
        if stored.keys() == expected:
            _set_stored(adapted, stored)
            adapted.merge_and_unload()
    except BuckeyeError:
        raise
    except Exception as error:  # peft raises arbitrary exceptions for settings that it does not expect
        raise UsageError(
            f"the adapter {adapter} cannot be merged into {base!r}: {error!r}",
            code="BK-ADAPTER",
            hint=_HINT,
        ) from error
    if stored.keys() != expected:
        raise UsageError(
            f"the adapter {adapter} does not fit the model {base!r}: the names of its tensors differ",
            code="BK-ADAPTER",
            hint="use the base model of the adapter",
        )
    model.requires_grad_(True)


@torch.no_grad()
def _set_stored(adapted: nn.Module, stored: Mapping[str, Tensor]) -> None:
    """Set the values of an adapter again, because peft does not load all tensors that it has named itself.

    For example, it renames the shared experts of Laguna, and leaves their adapter at its first values.
    """
    for name, parameter in adapted.named_parameters():
        values = stored.get(stored_name(name.removeprefix(_PREFIX)))
        if values is not None:
            parameter.copy_(values)


def check_adapter_base(adapter: Path, base: str) -> None:
    """Raise `UsageError` if an adapter was trained on other weights than those of `base`.

    Do nothing if the file of the adapter has no digest of its base model, or if `base` has no local weights.
    """
    with safe_open(adapter / WEIGHTS_FILE, "pt") as file:
        recorded = (file.metadata() or {}).get(BASE_DIGEST_KEY)
    actual = base_digest(base)
    if None not in (recorded, actual) and recorded != actual:
        raise UsageError(
            f"the adapter {adapter} was trained on other weights than those of {base!r}",
            code="BK-ADAPTER",
            hint="use the base model of the adapter",
        )


def _comparable(value: Any) -> Any:
    """Return the value of a setting in a form that can be compared.

    For a list of module names, this is the sorted list of the last parts of the names, because tools write
    different full names. The names of the weights identify the modules.
    """
    if isinstance(value, list):
        return sorted({name.rpartition(".")[2] if isinstance(name, str) else name for name in value})
    return value or None


def stored_name(name: str) -> str:
    """Return the name that a parameter has in peft's files.

    peft removes the name of the adapter, and `modules_to_save` in names of fully trained modules.
    """
    plain = name.replace(f".modules_to_save.{ADAPTER_NAME}.", ".").replace(f".{ADAPTER_NAME}.", ".")
    return _PREFIX + plain


def base_name(name: str) -> str | None:
    """Return the name of a parameter in the files of the base model, or None for an adapter's matrix."""
    if ".lora_" in name:
        return None
    for part in (".base_layer.", ".original_module.", f".modules_to_save.{ADAPTER_NAME}."):
        name = name.replace(part, ".")
    return name


def _adapter_config(model: PreTrainedModel) -> dict[str, Any]:
    """Return the adapter's configuration for inference in a form that JSON supports."""
    content = model.peft_config[ADAPTER_NAME].to_dict()
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in content.items()}
    return {**plain, "inference_mode": True}
