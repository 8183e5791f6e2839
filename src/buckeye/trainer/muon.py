"""Muon for sharded matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from buckeye.trainer.parallel import shard_like, whole


class ShardedMuon(torch.optim.Muon):
    """torch's Muon, but for matrices of which each rank has a shard. The orthogonalisation needs the whole
    matrix: every rank gathers one after the other, and keeps its shard of the result."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every matrix that has a gradient. All ranks must call it alike; `closure` is not called."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    change = self._orthogonal(self._smoothed(parameter, group), group)
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(shard_like(change, parameter))
        return None

    def _smoothed(self, parameter: nn.Parameter, group: dict[str, Any]) -> Tensor:
        """The gradient after momentum, whole."""
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        return whole(gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer)

    def _orthogonal(self, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        """What torch's Muon without momentum and decay adds to a matrix of this gradient."""
        change = torch.zeros_like(gradient)
        change.grad = gradient
        settings = {key: group[key] for key in ("lr", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")}
        torch.optim.Muon([change], momentum=0.0, nesterov=False, weight_decay=0.0, **settings).step()
        return change
