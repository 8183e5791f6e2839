"""Weights that bitsandbytes has rounded, in its files or by `model.quantization`.

4 bits are NF4 with double quantization (Dettmers et al. 2023, arXiv:2305.14314), 8 bits are rows of int8
(Dettmers et al. 2022, arXiv:2208.07339).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import torch

from buckeye.base.distribution import need
from buckeye.errors import InferenceError

_STATE = ".quant_state.bitsandbytes__"
_PARTS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")


def unpacked_shapes(
    shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], torch.Tensor]
) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of a checkpoint with 4-bit tensors in their original shape.

    `read` returns a stored tensor. Raise `InferenceError` if the description of a tensor is not valid.
    """
    described = {name.partition(_STATE)[0]: name for name in shapes if _STATE in name}
    parts = {f"{name}{part}" for name in described for part in _PARTS} | set(described.values())
    unpacked = {name: shape for name, shape in shapes.items() if name not in parts}
    for name, state in described.items():
        try:
            unpacked[name] = tuple(json.loads(bytes(read(state).tolist()))["shape"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            message = f"cannot read the 4-bit tensor {name}: {error!r}"
            raise InferenceError(message, code="BK-MODEL-DAMAGED") from error
    return unpacked


def unpack(name: str, stored: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the tensor `name` as bitsandbytes computes with it, in float32.

    `stored` has all tensors of the file whose names start with `name`.
    """
    need("bitsandbytes", "a model with weights in 4 bits")
    from bitsandbytes.functional import QuantState, dequantize_4bit

    try:
        state = QuantState.from_dict(
            {key: tensor for key, tensor in stored.items() if key != name}, device=torch.device("cpu")
        )
        state.dtype = torch.float32  # the trainer does not round to the dtype before quantization either
        return dequantize_4bit(stored[name], state)
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        message = f"cannot read the 4-bit tensor {name}: {error}"
        raise InferenceError(message, code="BK-MODEL-DAMAGED") from error


def rounded(weight: torch.Tensor, quantization: str) -> torch.Tensor:
    """Return a matrix as bitsandbytes computes with it after the quantization "4bit" or "8bit"."""
    need("bitsandbytes", "model.quantization")
    from bitsandbytes import functional

    if quantization == "8bit":
        values, scales, _ = functional.int8_vectorwise_quant(weight.half())
        return functional.int8_vectorwise_dequant(values, scales)
    packed, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    state.dtype = torch.float32
    return functional.dequantize_4bit(packed, state)


def is_packed(name: str, names: Mapping[str, object]) -> bool:
    """Return True if `name` is a 4-bit tensor among the stored tensors `names`."""
    return f"{name}.absmax" in names
