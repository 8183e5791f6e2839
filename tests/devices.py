"""Devices other than the CPU, for tests: an NVIDIA GPU if available, and always `pretend`.

Tensors of `pretend` are in main memory, but an operation that mixes them with the CPU's fails, as on a GPU.
Operations that a GPU allows are allowed: copies between both, a zero-dimensional CPU tensor in place of a
number, and CPU tensors as indices.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

PRETEND = "pretend"
DEVICES = [
    PRETEND,
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
        ],
    ),
]
"""Arguments of `torch.device` for `@pytest.mark.parametrize("device", DEVICES)`."""

_COPIES = {"aten::copy_", "aten::_to_copy"}
atomic_sums: list[str] = []
"""Operations that added repeated rows in 16 bits. A GPU rounds each sum, and adds in any order."""

_ATOMIC = ("aten::index_add", "aten::scatter_add", "aten::index_select_backward")
_TAKE_CPU_INDICES = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}


class PretendTensor(torch.Tensor):
    """Tensor of `pretend` that wraps a CPU tensor, `inner`."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> PretendTensor:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(PRETEND, 0),
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __repr__(self, **_: Any) -> str:
        return f"PretendTensor({self.inner!r})"

    def tolist(self) -> Any:
        """Copy to main memory first, as from a GPU."""
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, op: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch.inference_mode(False):  # otherwise a tensor from outside has no views inside
            return _run(op, args, kwargs or {})


def _run(op: Any, args: Any, kwargs: Any) -> Any:
    """Run the operation on the CPU; its results are on the requested device, or on `pretend`."""
    name = op._schema.name
    if name not in _COPIES:
        _refuse_cpu_tensors(name, args, kwargs)
    if name.startswith(_ATOMIC) and args[0].dtype.itemsize == 2:
        atomic_sums.append(name)  # an exception in a backward pass would end the process
    wanted = kwargs.get("device")
    on_cpu = kwargs if wanted is None else {**kwargs, "device": torch.device("cpu")}
    result = op(*_inner(args), **_inner(on_cpu))
    if wanted is not None and torch.device(wanted).type == "cpu":
        return result
    if name == "aten::copy_" and not isinstance(args[0], PretendTensor):
        return args[0]
    wrapped = tree_map(lambda x: PretendTensor(x) if isinstance(x, torch.Tensor) else x, result)
    return return_and_correct_aliasing(op, args, kwargs, wrapped)


def _refuse_cpu_tensors(name: str, args: Any, kwargs: Any) -> None:
    values: list[Any] = []
    for value in (*args, *kwargs.values()):
        if not isinstance(value, list | tuple):
            values.append(value)
        elif name not in _TAKE_CPU_INDICES:
            values += value
    foreign = [
        tuple(value.shape)
        for value in values
        if isinstance(value, torch.Tensor) and not isinstance(value, PretendTensor) and value.dim()
    ]
    if foreign:
        raise RuntimeError(f"Expected all tensors on one device: {name} got CPU tensors of shapes {foreign}")


def _inner(values: Any) -> Any:
    return tree_map(lambda x: x.inner if isinstance(x, PretendTensor) else x, values)


# Called if no argument is a tensor of the device, or from within torch, bypassing `__torch_dispatch__`. All
# other functions that create tensors use these.


def _empty(size: Any, *, dtype: Any = None, **_: Any) -> PretendTensor:
    return PretendTensor(torch.empty(size, dtype=dtype))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> PretendTensor:
    return PretendTensor(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source: torch.Tensor, target: torch.Tensor, *_: Any) -> torch.Tensor:
    _inner(target).copy_(_inner(source))
    return target


class _Backend(_DummyBackendModule):
    """Functions that torch requires of a device's module."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


_setup_privateuseone_for_python_backend(PRETEND, backend_module=_Backend())
_aten, _all_namespaces = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
_aten.impl("empty.memory_format", _empty, "PrivateUse1")
_aten.impl("empty_strided", _empty_strided, "PrivateUse1")
_aten.impl("_copy_from", _copy_from, "PrivateUse1")
_all_namespaces.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
