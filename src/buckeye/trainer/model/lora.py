"""Low-rank adapters (Hu et al. 2021, arXiv 2106.09685) on a policy with frozen base weights.

A matrix W becomes W + alpha / rank * B A, with A [rank, in] random and B [out, rank] zero at first. Only A, B
and the fully trained modules have gradients.

This module imports peft, which takes seconds: import it only where an adapter exists.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from transformers import PreTrainedModel

from buckeye.config.trainer import LoRAConfig
from buckeye.errors import UsageError
from buckeye.trainer.model.adapter_files import ADAPTER_NAME

_SECTION = "trainer.model.experimental.lora"


def add_adapter(model: PreTrainedModel, config: LoRAConfig, *, base: str, frozen_dtype: torch.dtype) -> None:
    """Freeze `model`, add an adapter, and convert the frozen weights to `frozen_dtype`. The adapter is
    float32.

    A is drawn from torch's global generator. `base` is the name or directory that the model was loaded from,
    recorded for later loading of the adapter. Raise `UsageError` for modules that the model does not have, or
    that cannot be adapted.
    """
    _check_targets(model, config.target_modules)
    peft_config = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=list(config.target_modules),
        modules_to_save=_trained_in_full(model, config.modules_to_save) or None,
        base_model_name_or_path=str(Path(base).resolve()) if Path(base).is_dir() else base,
        task_type="CAUSAL_LM",
    )
    inject_adapter_in_model(peft_config, model, ADAPTER_NAME)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.float32 if parameter.requires_grad else frozen_dtype)


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Run the context with the adapter disabled. The base model is available without a second copy."""
    parts = [m for m in model.modules() if isinstance(m, BaseTunerLayer | AuxiliaryTrainingWrapper)]
    # peft's `enable_adapters` would change `requires_grad`, and a sharded model keeps copies of it
    for part in parts:
        part._disable_adapters = True
    try:
        yield
    finally:
        for part in parts:
            part._disable_adapters = False


def _check_targets(model: PreTrainedModel, targets: Iterable[str]) -> None:
    head = model.get_output_embeddings()
    linear = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head]
    missing = [target for target in targets if not _ending_in(target, linear)]
    if missing or not targets:
        kinds = dict.fromkeys(name.rpartition(".")[2] for name in linear)
        raise UsageError(
            f"{_SECTION}.target_modules: {', '.join(missing) or 'an empty list'} is no hidden linear layer "
            f"of this model. It has {', '.join(kinds)}. Embeddings and the output layer can be trained in "
            "full: name them in modules_to_save."
        )


def _trained_in_full(model: PreTrainedModel, modules: Iterable[str]) -> list[str]:
    """Return the full names of the fully trained modules."""
    names = [name for name, module in model.named_modules() if any(True for _ in module.parameters())]
    outer = (model.get_input_embeddings(), model.get_output_embeddings())
    tied = outer[0].weight is outer[1].weight
    found: list[str] = []
    for module in modules:
        matching = _ending_in(module, names)
        if not matching:
            raise UsageError(f"{_SECTION}.modules_to_save: this model has no module {module!r}.")
        if tied and any(model.get_submodule(name) in outer for name in matching):
            raise UsageError(
                f"{_SECTION}.modules_to_save: input and output embedding of this model are one matrix, and "
                f"training a copy of it as {module!r} would part them; leave it out."
            )
        found += [name for name in matching if name not in found]
    return found


def _ending_in(wanted: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name == wanted or name.endswith("." + wanted)]
