"""Sharding of a model among ranks: FSDP2 (fully sharded data parallel), its replicas, and tensor parallelism.

Every layer is a unit: its parameters are gathered before it runs, its gradients are summed, and each rank
keeps its shard (Zhao et al. 2023, arXiv 2304.11277). With tensor parallelism the ranks of a group also divide
the heads and the inner dimension of every layer (Shoeybi et al. 2019, arXiv 1909.08053). Each of them
computes the embeddings, norms and the output projection.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from buckeye.config.trainer import ModelConfig
from buckeye.errors import UsageError
from buckeye.trainer.model.policy import PolicyNetwork
from buckeye.trainer.parallel.ranks import REPLICATE, SHARD, TENSOR, Ranks

logger = logging.getLogger(__name__)

_TENSOR_PLAN: dict[str, type[ParallelStyle]] = {
    "self_attn.q_proj": ColwiseParallel,
    "self_attn.k_proj": ColwiseParallel,
    "self_attn.v_proj": ColwiseParallel,
    "self_attn.o_proj": RowwiseParallel,
    "mlp.gate_proj": ColwiseParallel,
    "mlp.up_proj": ColwiseParallel,
    "mlp.down_proj": RowwiseParallel,
}


def shard_policy(policy: PolicyNetwork, model: ModelConfig, ranks: Ranks) -> None:
    """Shard the policy's parameters among the ranks, in place. Call it before creating the optimizer.

    Gradients are then sums over all ranks' shares. Every forward and backward pass is a collective: all ranks
    must run the same number of passes. Raise `UsageError` for a model that tensor parallelism does not fit.
    """
    mesh = ranks.mesh
    if model.fsdp_cpu_offload and not offloads(model, policy.device):
        logger.warning("fsdp_cpu_offload has no effect on a CPU")
    if mesh is None:
        return
    layers = list(policy.model.base_model.layers)
    if mesh[TENSOR].size() > 1:
        _check_tensor_parallel(policy, mesh[TENSOR].size())
        for layer in layers:
            if policy.model.device.type != "meta":
                layer.to(policy.device)
            plan = {name: style() for name, style in _TENSOR_PLAN.items()}
            parallelize_module(layer, mesh[TENSOR], plan, src_data_rank=None)
    data = mesh[REPLICATE, SHARD] if mesh[REPLICATE].size() > 1 else mesh[SHARD]
    for layer in layers:
        _shard_unit(layer, data, policy, model, reshard=model.reshard_after_forward)
    _shard_unit(policy, data, policy, model, reshard=None)
    register_fsdp_forward_method(policy, "hidden_states")
    logger.info(
        "Sharded the model among %d ranks: %d replicas of %d shards, tensor parallel over %d",
        ranks.world_size,
        *(mesh[name].size() for name in (REPLICATE, SHARD, TENSOR)),
    )


def offloads(model: ModelConfig, device: torch.device) -> bool:
    """Return True if shards are kept in main memory while the device is a GPU."""
    return model.fsdp_cpu_offload and device.type == "cuda"


def reshard_policy(policy: PolicyNetwork) -> None:
    """Release parameters that stayed gathered after a forward pass without a backward pass.

    Afterwards the policy has only this rank's shards.
    """
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def gather_tensors(
    tensors: Mapping[str, Tensor], *, keep: bool, dtype: torch.dtype | None = None, copy: bool = False
) -> dict[str, Tensor]:
    """Return every tensor unsharded in main memory, floating-point ones as `dtype`.

    A rank without `keep` returns no tensors. Tensors are gathered one at a time, so such a rank never holds
    more than one. With `copy` the results share no memory with the model. All ranks must call it with equal
    arguments except `keep`. Tensors shared under two names stay shared.
    """
    gathered: dict[int, Tensor] = {}
    for tensor in tensors.values():
        if id(tensor) not in gathered:
            full = gather_tensor(tensor)
            gathered[id(tensor)] = _to_cpu(full, dtype, copy=copy) if keep else full.new_empty(0)
    return {name: gathered[id(tensor)] for name, tensor in tensors.items()} if keep else {}


def gather_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor gathered from its ranks.

    All of these must call it. An unsharded tensor is returned unchanged.
    """
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to(tensor.device_mesh.device_type).full_tensor()  # a shard in main memory cannot be sent


def shard_like(tensor: Tensor, parameter: nn.Parameter | None) -> Tensor:
    """Return this rank's shard of a whole tensor that belongs to `parameter` and has its shape.

    Any other tensor, or a tensor of an unsharded parameter, is returned unchanged.
    """
    if not isinstance(parameter, DTensor) or tensor.shape != parameter.shape:
        return tensor
    mesh = parameter.device_mesh
    shard = distribute_tensor(tensor.to(mesh.device_type), mesh, parameter.placements, src_data_rank=None)
    return shard.to(parameter.device)


def _shard_unit(
    unit: nn.Module, mesh: DeviceMesh, policy: PolicyNetwork, model: ModelConfig, *, reshard: bool | None
) -> None:
    param_dtype = policy.compute_dtype if policy.compute_dtype != torch.float32 else None
    fully_shard(
        unit,
        mesh=mesh,
        reshard_after_forward=reshard,
        mp_policy=MixedPrecisionPolicy(
            param_dtype=param_dtype,
            reduce_dtype=getattr(torch, model.reduce_dtype),
            cast_forward_inputs=False,
        ),
        offload_policy=CPUOffloadPolicy() if offloads(model, policy.device) else OffloadPolicy(),
    )
    assert isinstance(unit, FSDPModule)
    unit.set_force_sum_reduction_for_comms(True)  # gloo lacks NCCL's multiply-and-sum
    unit.set_gradient_divide_factor(1.0)


def _check_tensor_parallel(policy: PolicyNetwork, ranks: int) -> None:
    config = policy.model.config
    absent = [
        name
        for name in _TENSOR_PLAN
        if not all(_is_linear(layer, name) for layer in policy.model.base_model.layers)
    ]
    if absent:
        raise UsageError(
            f"tensor parallelism needs a dense Qwen or Llama model: the layers of {config.model_type} "
            f"have no linear {', '.join(absent)}",
            code="BK-MODEL-UNSUPPORTED",
            at=f"trainer.model.tp = {ranks}",
            hint="set it to 1",
        )
    sizes = {
        "attention heads": config.num_attention_heads,
        "key-value heads": config.num_key_value_heads,
        "intermediate units": config.intermediate_size,
    }
    uneven = [f"{size} {name}" for name, size in sizes.items() if size % ranks]
    if uneven:
        raise UsageError(
            f"the model has {' and '.join(uneven)}, which cannot be divided by {ranks}",
            code="BK-CONFIG-VALUE",
            at=f"trainer.model.tp = {ranks}",
            hint="set it to a divisor of these numbers, or to 1",
        )


def _is_linear(layer: nn.Module, name: str) -> bool:
    try:
        return isinstance(layer.get_submodule(name), nn.Linear)
    except AttributeError:
        return False


def _to_cpu(tensor: Tensor, dtype: torch.dtype | None, *, copy: bool) -> Tensor:
    if dtype is None or not tensor.is_floating_point():
        dtype = tensor.dtype
    if dtype.itemsize < tensor.dtype.itemsize:
        return tensor.to(dtype).cpu().contiguous()  # this order halves the transfer from a GPU
    return tensor.to("cpu", dtype, copy=copy).contiguous()


# torch warns that gathering a matrix that is sharded twice takes two collectives
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
