"""Optimizers, learning-rate schedules, and an optimizer's state as named tensors."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from buckeye.errors import CheckpointError

OptimizerType = Literal["adamw", "muon", "sgd"]
ScheduleType = Literal["constant", "linear", "cosine"]


def learning_rate(
    step: int,
    *,
    schedule: ScheduleType,
    peak: float,
    warmup: int = 0,
    decay: int = 0,
    min_lr: float = 0.0,
    max_steps: int | None = None,
) -> float:
    """The learning rate of optimizer step `step`, counted from 0.

    Warm-up rises in equal parts and reaches `peak` at its last step. `linear` falls from `peak` to `min_lr`
    over the last `decay` of `max_steps` steps, `cosine` over all steps after the warm-up along half a cosine;
    both would reach `min_lr` at step `max_steps`. Without `max_steps` nothing falls. `constant` is `peak`.
    """
    if schedule == "constant":
        return peak
    if step < warmup:
        return peak * (step + 1) / warmup
    if max_steps is None:
        return peak
    start = max(warmup, max_steps - decay) if schedule == "linear" else warmup
    done = min(1.0, max(0.0, (step - start) / max(1, max_steps - start)))
    left = 1.0 - done if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return min_lr + (peak - min_lr) * left


class NamedOptimizer:
    """One or more torch optimizers over named parameters, used as one."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], parts: list[torch.optim.Optimizer]) -> None:
        self._names = {parameter: name for name, parameter in parameters.items()}
        self._parts = parts

    def step(self, learning_rate: float) -> None:
        """Update the parameters from their gradients."""
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = learning_rate
            part.step()

    def state(self) -> dict[str, Tensor]:
        """Every state tensor as `<parameter name>/<state name>`; empty before the first step."""
        return {
            f"{self._names[parameter]}/{key}": value
            for part in self._parts
            for parameter, values in part.state.items()
            for key, value in values.items()
            if isinstance(value, Tensor)
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state()` returned. `CheckpointError` if it is of other parameters."""
        unknown = {key.rpartition("/")[0] for key in state} - set(self._names.values())
        if unknown:
            raise CheckpointError(f"The optimizer's state is of another model: {sorted(unknown)[:3]} ...")
        for part in self._parts:
            own = part.state_dict()
            indices = _indices(part)
            own["state"] = {i: _of_parameter(state, self._names[p]) for p, i in indices.items()}
            own["state"] = {i: values for i, values in own["state"].items() if values}
            part.load_state_dict(own)


def build_optimizer(
    parameters: Mapping[str, nn.Parameter],
    *,
    kind: OptimizerType,
    weight_decay: float,
    betas: tuple[float, float] = (0.9, 0.999),
    momentum: float = 0.9,
    nesterov: bool = True,
    embeddings: Collection[str] = (),
) -> NamedOptimizer:
    """An optimizer whose learning rate is given with each step. Only matrices decay.

    `muon` orthogonalises the momentum of the hidden matrices (Jordan et al. 2024), scaled so that its updates
    have AdamW's size (Liu et al. 2025, arXiv 2502.16982, "match_rms_adamw"); vectors and `embeddings` (names)
    go to AdamW. `betas` are AdamW's; `momentum` and `nesterov` SGD's.
    """
    if kind == "sgd":
        groups = _decay_groups(parameters.values(), weight_decay)
        sgd = torch.optim.SGD(groups, lr=0.0, momentum=momentum, nesterov=nesterov and momentum > 0)
        return NamedOptimizer(parameters, [sgd])
    hidden = {n: p for n, p in parameters.items() if kind == "muon" and p.dim() == 2 and n not in embeddings}
    others = [parameter for name, parameter in parameters.items() if name not in hidden]
    adamw = torch.optim.AdamW(_decay_groups(others, weight_decay), lr=0.0, betas=betas, fused=True)
    if not hidden:
        return NamedOptimizer(parameters, [adamw])
    muon = torch.optim.Muon(
        hidden.values(), lr=0.0, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    return NamedOptimizer(parameters, [muon, adamw])


def _decay_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, object]]:
    parameters = list(parameters)
    matrices = [p for p in parameters if p.dim() >= 2]
    vectors = [p for p in parameters if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _indices(part: torch.optim.Optimizer) -> dict[nn.Parameter, int]:
    """The numbers that `state_dict` gives to the parameters: their order over the groups."""
    ordered = [parameter for group in part.param_groups for parameter in group["params"]]
    return {parameter: index for index, parameter in enumerate(ordered)}


def _of_parameter(state: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key.rpartition("/")[2]: value for key, value in state.items() if key.rpartition("/")[0] == name}
