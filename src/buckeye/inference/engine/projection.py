"""Products with weight matrices, which are stored in the layout in which the processor multiplies fastest."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F

# oneDNN optimizes the layout of a matrix for this number of rows of x. Other numbers are slightly slower.
_PACKED_FOR_ROWS = 128
# For one row and a float32 matrix with fewer elements than this, oneDNN is slower than PyTorch.
_LARGE = 2**19
# For every new number of rows, oneDNN prepares the product. The preparation takes as long as the product with
# a small matrix. oneDNN keeps half a megabyte or more for it until the process ends.
_SIZES_PER_OCTAVE = 8


class Projection:
    """Function that returns x W^T + b, for x [N, in], the weight W [out, in], and the bias b [out] or None.

    x has the dtype of W. On a CPU, W is copied into oneDNN's blocked layout, which is up to twice as fast.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._bias = bias
        self._adapter: tuple[torch.Tensor, torch.Tensor] | None = None
        self._packed: torch.Tensor | None = None
        self._plain: torch.Tensor | None = weight
        if _packs(weight):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
            if weight.dtype is not torch.float32 or weight.numel() >= _LARGE:
                self._plain = None

    def with_adapter(self, a: torch.Tensor, b: torch.Tensor) -> Projection:
        """Return a projection that adds (x A^T) B^T, for A [rank, in] and B [out, rank], both float32.

        The new projection shares the weight W with this one.
        """
        adapted = copy.copy(self)
        adapted._adapter = (a, b)
        return adapted

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors that the projection computes with."""
        tensors = (self._plain, self._packed, self._bias, *(self._adapter or ()))
        return tuple(tensor for tensor in tensors if tensor is not None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return [N, out] for x [N, in], in the dtype of x."""
        added = None
        if self._adapter is not None:
            a, b = self._adapter
            added = F.linear(F.linear(x.float(), a), b).to(x.dtype)
        if self._plain is not None and (self._packed is None or x.shape[0] == 1):
            return self._multiply_unpacked(x, self._plain, added)
        rows = x.shape[0]
        padding = (0, 0, 0, padded_rows(rows) - rows)
        if padding[-1]:
            x = F.pad(x, padding)
            added = None if added is None else F.pad(added, padding)
        if added is None:
            product = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        else:
            product = torch.ops.mkldnn._linear_pointwise.binary(x, added, self._packed, self._bias, "add")
        return product[:rows]

    def _multiply_unpacked(
        self, x: torch.Tensor, weight: torch.Tensor, added: torch.Tensor | None
    ) -> torch.Tensor:
        if added is None:
            return F.linear(x, weight, self._bias)
        # Round the sum once: a separately rounded product would lose the small addend.
        product = torch.addmm(added, x, weight.T)
        return product if self._bias is None else product + self._bias


def padded_rows(rows: int) -> int:
    """Round a number of rows up by at most an eighth. The result has eight values per power of two."""
    step = 2 ** max(0, (rows - 1).bit_length() - 1) // _SIZES_PER_OCTAVE or 1
    return -(-rows // step) * step


def _packs(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return weight.dtype is torch.float32 or (
        weight.dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
