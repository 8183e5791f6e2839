"""Sharding of a model among ranks: FSDP2 (fully sharded data parallel) with replicas, and tensor parallelism.

FSDP gathers the parameters of a layer before the layer runs. It sums the gradients of the layer over the
ranks, and each rank keeps its shard (Zhao et al. 2023, arXiv 2304.11277). With tensor parallelism, the ranks
of a group also divide the heads and the inner dimension of every layer (Shoeybi et al. 2019, arXiv
1909.08053). Each rank of the group computes all embeddings and norms, and the whole output projection.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

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
    """Shard the parameters of the policy among the ranks, in place. Call this before creating the optimizer.

    Afterwards all ranks must run equally many forward and backward passes, because each pass communicates.
    Gradients are sums over all ranks. Raise `UsageError` if the model has no list `layers`, or if tensor
    parallelism does not support it.
    """
    mesh = ranks.mesh
    if model.fsdp_cpu_offload and not offloads(model, policy.device):
        logger.warning("fsdp_cpu_offload has no effect on a CPU")
    if mesh is None:
        return
    layers = list(_find_layers(policy))
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
    """Return True if the shards are kept in main memory, although the device is a GPU."""
    return model.fsdp_cpu_offload and device.type == "cuda"


def reshard_policy(policy: PolicyNetwork) -> None:
    """Release parameters that stayed gathered after a forward pass without a backward pass.

    Afterwards the policy has only the shards of this rank.
    """
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def gather_tensors(
    tensors: Mapping[str, Tensor], *, keep: bool, dtype: torch.dtype | None = None, copy: bool = False
) -> dict[str, Tensor]:
    """Return every tensor unsharded in main memory. Floating-point tensors have the type `dtype`.

    A rank without `keep` returns {}. It has only one gathered tensor in memory at a time. With `copy`, the
    results share no memory with the model. A tensor that has two names is gathered once. All ranks must call
    this function with equal arguments, except `keep`.
    """
    gathered: dict[int, Tensor] = {}
    for tensor in tensors.values():
        if id(tensor) not in gathered:
            full = gather_tensor(tensor)
            gathered[id(tensor)] = _to_cpu(full, dtype, copy=copy) if keep else full.new_empty(0)
    return {name: gathered[id(tensor)] for name, tensor in tensors.items()} if keep else {}


def gather_tensor(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor from its ranks, which must all call this function. Return the whole tensor.

    A tensor that is not sharded is returned unchanged.
    """
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to(tensor.device_mesh.device_type).full_tensor()  # NCCL cannot send from main memory


def shard_like(tensor: Tensor, parameter: nn.Parameter | None) -> Tensor:
    """Return this rank's shard of a tensor that is sharded like `parameter`.

    Return the tensor unchanged if the parameter is not sharded, or has another shape.
    """
    if not isinstance(parameter, DTensor) or tensor.shape != parameter.shape:
        return tensor
    mesh = parameter.device_mesh
    shard = distribute_tensor(tensor.to(mesh.device_type), mesh, parameter.placements, src_data_rank=None)
    return shard.to(parameter.device)


def _find_layers(policy: PolicyNetwork) -> Iterable[nn.Module]:
    layers = getattr(policy.model.base_model, "layers", None)
    if layers is None:
        raise UsageError(
            f"{policy.model.config.model_type} models cannot be sharded: their layers have another name",
            code="BK-MODEL-UNSUPPORTED",
            at="trainer.model.sharding",
            hint='set it to "none"',
        )
    found: nn.ModuleList = layers
    return found


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
    unit.set_force_sum_reduction_for_comms(True)  # gloo does not support NCCL's multiply-and-sum
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
        return tensor.to(dtype).cpu().contiguous()  # converting before the transfer halves its size
    return tensor.to("cpu", dtype, copy=copy).contiguous()


# hide torch's warning that gathering a matrix with two sharded dimensions is slow
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
