"""Root-mean-square norm that reads its input twice, while transformers' norm reads it nine times.

    y = w x r        r = (mean(x^2) + eps)^(-1/2)        dx = r (w g - x r mean(g y))        dw = sum(g x r)

Here g is the gradient of y (Zhang and Sennrich 2019, arXiv 1910.07467). The backward pass calls torch's
kernel for layer norm with a mean of 0. This kernel also subtracts r mean(w g), which the backward pass adds
again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_SAME_FORMULA = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")


class RMSNorm(nn.Module):
    """Norm of the Llama and Qwen families, computed in float32 or better. It returns the input's dtype."""

    def __init__(self, weight: nn.Parameter, epsilon: float) -> None:
        super().__init__()
        self.weight = weight
        self.epsilon = epsilon

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalize `hidden` [..., width] over its last dimension."""
        return _RMSNorm.apply(hidden, self.weight, self.epsilon)


def replace_norms(model: nn.Module) -> None:
    """Replace the norms of Llama, Mistral and Qwen with `RMSNorm`. The names of parameters do not change."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child).__name__ in _SAME_FORMULA:
                setattr(module, name, RMSNorm(child.weight, child.variance_epsilon))


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        precise = torch.promote_types(hidden.dtype, torch.float32)
        squares = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True, dtype=precise).square_()
        scale = squares.div_(hidden.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(hidden, weight, scale)
        return (hidden.to(precise) * scale).mul_(weight).to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        hidden, weight, scale = ctx.saved_tensors
        gradient, factor = gradient.to(scale.dtype).contiguous(), weight.to(scale.dtype)
        width = hidden.shape[-1]
        d_hidden, d_weight, _ = torch.ops.aten.native_layer_norm_backward(
            gradient,
            hidden.to(scale.dtype).contiguous(),
            [width],
            torch.zeros_like(scale),
            scale,
            factor,
            None,
            [True, ctx.needs_input_grad[1], False],
        )
        # not a matrix product, because autocast would round its result
        mean = (gradient * factor).sum(-1, keepdim=True).div_(width)
        d_weight = d_weight.to(weight.dtype) if ctx.needs_input_grad[1] else None
        return d_hidden.addcmul_(scale, mean).to(hidden.dtype), d_weight, None
