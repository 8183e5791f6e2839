"""Low-rank adapters (Hu et al. 2021, arXiv 2106.09685) on a policy with frozen base weights.

A matrix W becomes W + alpha / rank * B A, or with rsLoRA W + alpha / sqrt(rank) * B A. At first A [rank, in]
is random, and B [out, rank] is zero. Only A, B and the fully trained modules have gradients.

This module imports peft, which takes seconds. So import this module only if there is an adapter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

from buckeye.config.trainer import LoRAConfig
from buckeye.errors import UsageError
from buckeye.inference.engine.general_spec import inject_adapter, is_linear
from buckeye.trainer.model.adapter_files import ADAPTER_NAME
from buckeye.trainer.parallel.fsdp import shard_like

_SECTION = "trainer.model.experimental.lora"


def add_adapter(model: PreTrainedModel, config: LoRAConfig, *, base: str, frozen_dtype: torch.dtype) -> None:
    """Freeze `model`, add an adapter in float32, and convert the frozen weights to `frozen_dtype`.

    `set_adapter` sets the adapter's values, after the model was sharded. `base` is the name or directory of
    the model, which is stored in the adapter's configuration. Raise `UsageError` for modules that the model
    does not have, or that cannot be adapted.
    """
    _check_targets(model, config.target_modules)
    peft_config = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=list(config.target_modules),
        use_rslora=config.use_rslora,
        layers_to_transform=config.layers_to_transform,
        modules_to_save=_full_module_names(model, config.modules_to_save) or None,
        base_model_name_or_path=str(Path(base).resolve()) if Path(base).is_dir() else base,
        task_type="CAUSAL_LM",
    )
    problem = inject_adapter(peft_config, model, ADAPTER_NAME)
    if problem is not None:
        raise _target_error(problem)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.float32 if parameter.requires_grad else frozen_dtype)


@torch.no_grad()
def set_adapter(model: PreTrainedModel, stored: Mapping[str, Tensor] | None) -> None:
    """Set the adapter's values: `stored`, by the names of the parameters, or if None the first values.

    torch's global generator draws A. B is zero. All ranks of a sharded model draw equal values.
    """
    for name, parameter in model.named_parameters():
        if stored is not None:
            values = stored.get(name)
        elif ".lora_A." in name:
            values = nn.init.kaiming_uniform_(torch.empty(parameter.shape), a=math.sqrt(5))
        else:
            values = torch.zeros(parameter.shape) if ".lora_B." in name else None
        if values is not None:
            parameter.copy_(shard_like(values, parameter))


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Disable the adapter inside this context. The model then computes like the base model."""
    parts = [m for m in model.modules() if isinstance(m, BaseTunerLayer | AuxiliaryTrainingWrapper)]
    # peft's `enable_adapters` would change `requires_grad`, which a sharded model has copied before
    for part in parts:
        part._disable_adapters = True
    try:
        yield
    finally:
        for part in parts:
            part._disable_adapters = False


def _check_targets(model: PreTrainedModel, targets: Iterable[str]) -> None:
    head = model.get_output_embeddings()
    linear = [n for n, m in model.named_modules() if is_linear(n, m) and m is not head]
    missing = [target for target in targets if not _names_ending_in(target, linear)]
    if missing or not targets:
        kinds = dict.fromkeys(name.rpartition(".")[2] for name in linear)
        raise _target_error(
            f"no hidden linear layer of the model is named {', '.join(missing)}"
            if missing
            else "the list is empty",
            hint=f"choose from {', '.join(kinds)}; to train embeddings or the output layer in full, "
            "name them in modules_to_save",
        )


def _target_error(message: str, *, hint: str = "name other layers") -> UsageError:
    return UsageError(message, code="BK-CONFIG-VALUE", at=f"{_SECTION}.target_modules", hint=hint)


def _full_module_names(model: PreTrainedModel, modules: Iterable[str]) -> list[str]:
    names = [name for name, module in model.named_modules() if any(True for _ in module.parameters())]
    embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
    is_tied = embeddings[0].weight is embeddings[1].weight
    full_names: list[str] = []
    for module in modules:
        matching = _names_ending_in(module, names)
        if not matching:
            raise UsageError(
                f"the model has no module {module!r}",
                code="BK-CONFIG-VALUE",
                at=f"{_SECTION}.modules_to_save",
                hint="name a module of the model, such as lm_head",
            )
        if is_tied and any(model.get_submodule(name) in embeddings for name in matching):
            raise UsageError(
                f"{module!r} cannot be trained in full: input and output embedding are one matrix",
                code="BK-CONFIG-VALUE",
                at=f"{_SECTION}.modules_to_save",
                hint="leave it out",
            )
        full_names += [name for name in matching if name not in full_names]
    return full_names


def _names_ending_in(suffix: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name == suffix or name.endswith("." + suffix)]
