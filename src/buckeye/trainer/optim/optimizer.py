"""Optimizers, learning-rate schedules, gradient clipping, and optimizer state as named tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from buckeye.base.distribution import need
from buckeye.config.trainer import (
    AdamW8bitConfig,
    ConstantSchedulerConfig,
    LinearSchedulerConfig,
    MuonConfig,
    OptimizerConfig,
    SchedulerConfig,
    SGDConfig,
)
from buckeye.errors import CheckpointError, UsageError
from buckeye.trainer.parallel.fsdp import gather_tensor, shard_like
from buckeye.trainer.parallel.ranks import TENSOR, Ranks

_BUCKET_ELEMENTS = 16 * 2**20  # 64 MiB of float32

# Each tensor-parallel rank has only the part of these gradients from its own heads. So they are summed, not
# averaged.
_PARTIAL_GRADIENTS = ("q_norm.weight", "k_norm.weight")


class ShardedMuon(torch.optim.Muon):
    """Muon optimizer for matrices that are sharded among ranks.

    Orthogonalization needs the whole matrix. So every rank gathers one matrix at a time, and keeps its shard
    of the result.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every matrix that has a gradient.

        All ranks must call this method. `closure` is never called.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    change = self._muon_update(self._momentum_gradient(parameter, group), group)
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(shard_like(change, parameter))
        return None

    def _momentum_gradient(self, parameter: nn.Parameter, group: dict[str, Any]) -> Tensor:
        """Return the unsharded gradient of a parameter, with momentum."""
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        return gather_tensor(gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer)

    def _muon_update(self, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        """Return the update that torch's Muon computes for a gradient, without momentum and weight decay."""
        change = torch.zeros_like(gradient)
        change.grad = gradient
        settings = {key: group[key] for key in ("lr", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")}
        torch.optim.Muon([change], momentum=0.0, nesterov=False, weight_decay=0.0, **settings).step()
        return change


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningRateSchedule:
    """Learning rate by optimizer step.

    `constant` is always `peak`. `linear` and `cosine` start with a warm-up, in which the learning rate rises
    linearly and reaches `peak` at the last step. `linear` falls from `peak` to `min_lr` in the last `decay`
    steps before `max_steps`. `cosine` falls along half a cosine from the end of the warm-up to `max_steps`.
    Without `max_steps`, the learning rate does not fall.
    """

    config: SchedulerConfig
    peak: float
    max_steps: int | None = None

    def at(self, step: int) -> float:
        """Return the learning rate of an optimizer step, counted from 0."""
        config = self.config
        if isinstance(config, ConstantSchedulerConfig):
            return self.peak
        if step < config.warmup:
            return self.peak * (step + 1) / config.warmup
        if self.max_steps is None:
            return self.peak
        start = config.warmup
        if isinstance(config, LinearSchedulerConfig):
            start = max(start, self.max_steps - config.decay)
        done = min(1.0, max(0.0, (step - start) / max(1, self.max_steps - start)))
        left = 1.0 - done if config.type == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return config.min_lr + (self.peak - config.min_lr) * left


class NamedOptimizer:
    """One or more torch optimizers with one interface. Their state has the names of the parameters."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], parts: list[torch.optim.Optimizer], *, kind: str
    ) -> None:
        self.kind = kind
        self._names = {parameter: name for name, parameter in parameters.items()}
        self._parts = parts
        self._is_offloaded = False

    def offload(self) -> None:
        """Keep the state in main memory from now on, except during an update. The results are equal."""
        self._is_offloaded = True
        self._move_state(on_device=False)

    def _move_state(self, *, on_device: bool) -> None:
        for part in self._parts:
            for parameter, values in part.state.items():
                target = parameter.device if on_device else torch.device("cpu")
                for key, value in values.items():
                    # zero-dimensional tensors count steps, and stay where the optimizer put them
                    if isinstance(value, Tensor) and value.dim() and value.device != target:
                        values[key] = _moved(value, target)

    def step(self, learning_rate: float) -> None:
        """Update the parameters from their gradients."""
        if self._is_offloaded:
            self._move_state(on_device=True)
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = learning_rate
            part.step()
        if self._is_offloaded:
            self._move_state(on_device=False)

    def state(self) -> dict[str, Tensor]:
        """Return the state tensors by name: `<parameter name>/<kind>.<state name>`.

        The result is empty before the first step.
        """
        return {
            f"{self._names[parameter]}/{self.kind}.{key}": value
            if isinstance(value, Tensor)
            else torch.tensor(value)
            for part in self._parts
            for parameter, values in part.state.items()
            for key, value in values.items()
            if isinstance(value, Tensor | int)
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state that `state` returned.

        Raise `CheckpointError` if the state is for other parameters, or for another kind of optimizer.
        """
        unknown = {key.rpartition("/")[0] for key in state} - set(self._names.values())
        if unknown:
            raise CheckpointError(
                f"the optimizer state has parameters that the model does not have: {sorted(unknown)[:3]} ...",
                code="BK-CHECKPOINT-MISMATCH",
                hint="resume with the model of the checkpoint, or start a new run",
            )
        kinds = {key.rpartition("/")[2].rpartition(".")[0] for key in state}
        if kinds - {self.kind}:
            recorded = ", ".join(sorted(kinds - {""})) or "an unknown type (an earlier version wrote it)"
            raise CheckpointError(
                f"the optimizer state is of {recorded}, but trainer.optim.type is {self.kind}",
                code="BK-CHECKPOINT-MISMATCH",
                hint="restore trainer.optim.type, or start a new run from the weights",
            )
        by_parameter: dict[str, dict[str, Any]] = {}
        for key, value in state.items():
            name, _, entry = key.rpartition("/")
            # torch's optimizers count steps in a float tensor; the 8-bit optimizer counts in an int
            is_int = value.dim() == 0 and not value.is_floating_point()
            by_parameter.setdefault(name, {})[entry.rpartition(".")[2]] = int(value) if is_int else value
        for part in self._parts:
            part_state = part.state_dict()
            indices = {self._names[parameter]: i for parameter, i in _parameter_indices(part).items()}
            part_state["state"] = {i: by_parameter[n] for n, i in indices.items() if n in by_parameter}
            part.load_state_dict(part_state)


def _moved(value: Tensor, device: torch.device) -> Tensor:
    """Return a copy on another device. Main memory is pinned, so that copies from and to a GPU are fast."""
    if device.type == "cpu" and value.is_cuda and type(value) is Tensor:
        return torch.empty_like(value, device=device, pin_memory=True).copy_(value)
    return value.to(device)


def build_optimizer(
    parameters: Mapping[str, nn.Parameter], config: OptimizerConfig, *, embeddings: Collection[str] = ()
) -> NamedOptimizer:
    """Return the optimizer of `config`. Only matrices have weight decay.

    `muon` orthogonalizes the momentum of matrices (Jordan et al. 2024), and scales it so that the updates are
    as large as AdamW's (Liu et al. 2025, arXiv 2502.16982, "match_rms_adamw"). Vectors and the parameters
    named in `embeddings` use AdamW.

    `adamw8bit` stores both moments in 8 bits per element, with a scale per block (Dettmers et al. 2022, arXiv
    2110.02861). Tensors with fewer than 4,096 elements have moments in 32 bits. Raise `UsageError` if the
    model is sharded, or bitsandbytes is not installed.
    """

    def groups_of(names: Collection[str]) -> list[dict[str, object]]:
        return _torch_groups([parameters[name] for name in names], config.weight_decay)

    parts: list[torch.optim.Optimizer] = []
    if isinstance(config, SGDConfig):
        nesterov = config.nesterov and config.momentum > 0
        parts.append(
            torch.optim.SGD(groups_of(parameters), lr=0.0, momentum=config.momentum, nesterov=nesterov)
        )
        return NamedOptimizer(parameters, parts, kind=config.type)
    betas = config.betas1, config.betas2
    if isinstance(config, AdamW8bitConfig):
        parts.append(_adamw8bit(groups_of(parameters), parameters, betas))
        return NamedOptimizer(parameters, parts, kind=config.type)
    hidden: list[str] = []
    if isinstance(config, MuonConfig):
        hidden = [name for name, p in parameters.items() if p.dim() == 2 and name not in embeddings]
        sharded = any(isinstance(parameters[name], DTensor) for name in hidden)
        muon = ShardedMuon if sharded else torch.optim.Muon
        settings = {"momentum": config.momentum, "nesterov": config.nesterov}
        if hidden:
            parts.append(muon(groups_of(hidden), lr=0.0, adjust_lr_fn="match_rms_adamw", **settings))
    others = [name for name in parameters if name not in set(hidden)]
    if others:
        parts.append(torch.optim.AdamW(groups_of(others), lr=0.0, betas=betas, fused=True))
    return NamedOptimizer(parameters, parts, kind=config.type)


def sum_gradients(
    parameters: Mapping[str, nn.Parameter], ranks: Ranks, *, dtype: torch.dtype = torch.float32
) -> None:
    """Sum every gradient over all ranks. A missing gradient counts as zero.

    Ranks with whole copies of the model exchange gradients as `dtype`. Tensor-parallel ranks exchange
    float32.
    """
    for parameter in parameters.values():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    if ranks.mesh is None:
        if ranks.world_size > 1:
            _all_reduce(map(_gradient, parameters.values()), ranks, None, dtype)
    elif ranks.mesh[TENSOR].size() > 1:
        _reduce_replicated(parameters, ranks, ranks.mesh[TENSOR])


def gradient_norm(parameters: Iterable[nn.Parameter], ranks: Ranks) -> float:
    """Return the Euclidean norm of the whole gradient, equal on all ranks.

    The norm is not finite if any element of the gradient is not finite.
    """
    groups: dict[tuple[str, ...], list[Tensor]] = {}
    for parameter in parameters:
        groups.setdefault(_sharded_dimensions(parameter), []).append(_gradient(parameter))
    squares = []
    for dimensions, gradients in groups.items():
        square = torch.nn.utils.get_total_norm(gradients).to(ranks.device, torch.float64) ** 2
        for dimension in dimensions:
            assert ranks.mesh is not None
            dist.all_reduce(square, group=ranks.mesh[dimension].get_group())
        squares.append(float(square))
    return math.sqrt(sum(squares))


def clip_gradients(parameters: Iterable[nn.Parameter], norm: float, limit: float | None) -> None:
    """Scale the gradient by `limit / norm` if its norm exceeds `limit`. None: no limit."""
    if limit is not None and norm > limit:
        torch._foreach_mul_([_gradient(p) for p in parameters], limit / norm)


def _adamw8bit(
    groups: list[dict[str, object]], parameters: Mapping[str, nn.Parameter], betas: tuple[float, float]
) -> torch.optim.Optimizer:
    need("bitsandbytes", "trainer.optim.type = 'adamw8bit'")
    from bitsandbytes.optim import AdamW8bit

    if any(isinstance(parameter, DTensor) for parameter in parameters.values()):
        raise UsageError(
            "adamw8bit cannot update a sharded model",
            code="BK-CONFIG-CONFLICT",
            at="trainer.optim.type",
            hint="set trainer.model.sharding = 'none', or use adamw, whose moments are sharded too",
        )
    return AdamW8bit(groups, lr=0.0, betas=betas)


def _torch_groups(parameters: Sequence[nn.Parameter], weight_decay: float) -> list[dict[str, object]]:
    """Return torch parameter groups: matrices with weight decay, vectors without."""
    matrices = [parameter for parameter in parameters if parameter.dim() >= 2]
    vectors = [parameter for parameter in parameters if parameter.dim() < 2]
    groups = ((matrices, weight_decay), (vectors, 0.0))
    return [{"params": members, "weight_decay": decay} for members, decay in groups if members]


def _parameter_indices(part: torch.optim.Optimizer) -> dict[nn.Parameter, int]:
    """Return the index that `state_dict` uses for each parameter."""
    ordered = [parameter for group in part.param_groups for parameter in group["params"]]
    return {parameter: index for index, parameter in enumerate(ordered)}


def _reduce_replicated(parameters: Mapping[str, nn.Parameter], ranks: Ranks, mesh: DeviceMesh) -> None:
    """Make the gradients of replicated parameters equal on all tensor-parallel ranks.

    Partial gradients are summed. The other gradients differ between ranks only by rounding, and are averaged.
    """
    replicated = {name: p for name, p in parameters.items() if TENSOR not in _sharded_dimensions(p)}
    for name, parameter in replicated.items():
        if not name.endswith(_PARTIAL_GRADIENTS):
            _gradient(parameter).div_(mesh.size())
    _all_reduce(map(_gradient, replicated.values()), ranks, mesh.get_group(), torch.float32)


def _gradient(parameter: nn.Parameter) -> Tensor:
    """Return this rank's part of a parameter's gradient."""
    assert parameter.grad is not None
    return parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad


def _sharded_dimensions(parameter: nn.Parameter) -> tuple[str, ...]:
    """Return the mesh dimensions along which ranks hold different parts of a parameter."""
    if not isinstance(parameter, DTensor):
        return ()
    names = parameter.device_mesh.mesh_dim_names or ()
    return tuple(
        name
        for name, placement in zip(names, parameter.placements, strict=True)
        if not placement.is_replicate()
    )


def _all_reduce(
    gradients: Iterable[Tensor], ranks: Ranks, group: dist.ProcessGroup | None, dtype: torch.dtype
) -> None:
    for bucket in _buckets(gradients):
        flat = torch.cat([g.flatten() for g in bucket]).to(ranks.device, dtype)
        dist.all_reduce(flat, group=group)
        for gradient, summed in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            gradient.copy_(summed.view_as(gradient))


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    filled = 0
    for tensor in tensors:
        if bucket and filled + tensor.numel() > _BUCKET_ELEMENTS:
            yield bucket
            bucket, filled = [], 0
        bucket.append(tensor)
        filled += tensor.numel()
    if bucket:
        yield bucket
