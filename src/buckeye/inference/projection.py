"""Matrix products with weights, in the layout that the processor multiplies fastest."""

from __future__ import annotations

import torch
import torch.nn.functional as F

# oneDNN lays a matrix out for products with about so many rows; other numbers of rows cost little more.
_PACKED_FOR_ROWS = 128
# One row times a float32 matrix with fewer elements is over before oneDNN has begun.
_LARGE = 2**19
# oneDNN prepares a product for every number of rows anew. That takes as long as the product of a small
# matrix, and half a megabyte or more that it does not give back.
_SIZES_IN_AN_OCTAVE = 8


class Projection:
    """x -> x W^T + b for x [N, in] in the dtype of W [out, in]; b is [out] or None.

    On a CPU W is copied into oneDNN's blocked layout, in which products take down to half the time.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._bias = bias
        self._packed: torch.Tensor | None = None
        self._plain: torch.Tensor | None = weight
        if _packs(weight):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
            if weight.dtype is not torch.float32 or weight.numel() >= _LARGE:
                self._plain = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, in] -> [N, out], in the dtype of x."""
        if self._plain is not None and (self._packed is None or x.shape[0] == 1):
            return F.linear(x, self._plain, self._bias)
        rows = x.shape[0]
        padding = padded_rows(rows) - rows
        if padding:
            x = F.pad(x, (0, 0, 0, padding))
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")[:rows]


def padded_rows(rows: int) -> int:
    """So many rows or up to an eighth more, so that there are few sizes: eight from a power of two to the
    next."""
    step = 2 ** max(0, (rows - 1).bit_length() - 1) // _SIZES_IN_AN_OCTAVE or 1
    return -(-rows // step) * step


def _packs(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return weight.dtype is torch.float32 or (
        weight.dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
