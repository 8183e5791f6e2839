"""Mixtures of experts: the share of the weights that a token uses, and the load of the experts."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")


def active_share(config: PreTrainedConfig) -> float:
    """Return the share of the routed experts that a token uses; 1 without routed experts."""
    experts, active = _setting(config, _COUNTS), _setting(config, _ACTIVE)
    return active / experts if 0 < active < experts else 1.0


class ExpertLoads:
    """Counter of the tokens that each expert of each layer computed in forward passes with a gradient."""

    def __init__(self, model: nn.Module, config: PreTrainedConfig) -> None:
        self._experts = _setting(config, _COUNTS)
        layers = [module for name, module in model.named_modules() if name.endswith(".experts")]
        self._counts: list[Tensor | None] = [None] * (len(layers) if self._experts else 0)
        self.real: Tensor | None = None
        """Mask bool[tokens] of the tokens to count, of padded and of empty rows. Other rows have none."""
        for number in range(len(self._counts)):
            layers[number].register_forward_pre_hook(partial(self._count, number))

    def _count(self, number: int, _module: nn.Module, args: tuple[Any, ...]) -> None:
        """Count the experts in `args[1]`, i64[tokens, active]. transformers passes them to all experts."""
        chosen = args[1] if len(args) > 1 and isinstance(args[1], Tensor) else None
        if chosen is None or chosen.is_floating_point() or not torch.is_grad_enabled():
            return
        counts = self._counts[number]
        if counts is None:  # the last element counts tokens without an expert
            counts = self._counts[number] = chosen.new_zeros(self._experts + 1, dtype=torch.int64)
        real = torch.ones_like(chosen)
        if self.real is not None and len(self.real) == len(chosen):
            real = self.real[:, None].expand_as(chosen)
        counts.scatter_add_(0, chosen.flatten().clamp_max(self._experts), real.flatten().long())

    def take(self) -> Tensor:
        """Return the counts i64[layers, experts] since the last call. Without experts, they are empty."""
        counts, self._counts = self._counts, [None] * len(self._counts)
        total = torch.zeros(len(counts), self._experts, dtype=torch.int64)
        for row, count in zip(total, counts, strict=True):
            if count is not None:
                row.copy_(count[:-1])
        return total


def load_metrics(counts: Tensor) -> dict[str, float]:
    """Return metrics of the load i64[layers, experts]; empty without routed tokens.

    `experts/max_load` is the load of the busiest expert relative to the mean of its layer, and
    `experts/unused` the share of experts without a token.
    """
    counts = counts[counts.sum(1) > 0].double()
    if not len(counts):
        return {}
    relative = counts / counts.mean(1, keepdim=True)
    return {
        "experts/max_load": float(relative.max()),
        "experts/unused": float((counts == 0).double().mean()),
    }


def _setting(config: PreTrainedConfig, names: tuple[str, ...]) -> int:
    text = config.get_text_config(decoder=True)
    values = (getattr(text, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), 0)
