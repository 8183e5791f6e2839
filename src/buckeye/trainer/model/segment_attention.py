"""Attention within many short segments, computed with batched matrix products.

With scores S = scale * Q K^T + mask, P = softmax(S) and O = P V:

    dV = P^T dO      dS = P * (dO V^T - rowsum(dO * O))      dQ = scale * dS K      dK = scale * dS^T Q

The forward pass stores P for the backward pass, in the dtype of the inputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def short_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return the attention output [segments, length, heads, dim].

    `query` has the shape of the output. `key` and `value` are [segments, keys, key-value heads, dim]. `mask`
    f32[1 or segments, length, keys] is added to the scores.
    """
    return _ShortAttention.apply(query, key, value, mask, scale)


class _ShortAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
        length, kv_heads = query.shape[1], key.shape[2]
        q, k, v = (_by_head(rows, kv_heads) for rows in (query, key, value))
        scores = torch.bmm(q, k.transpose(1, 2)).to(mask.dtype)
        by_segment = scores.view(len(mask), -1, *mask.shape[1:])  # all heads share the mask
        torch.add(mask[:, None], by_segment, alpha=scale, out=by_segment)
        p = torch.softmax(scores, -1).to(v.dtype)
        output = torch.bmm(p, v)
        ctx.save_for_backward(q, k, v, p, output)
        ctx.scale = scale
        return _by_token(output, kv_heads, length)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, p, output = ctx.saved_tensors
        length, keys, kv_heads = gradient.shape[1], k.shape[1], len(k) // len(gradient)
        d_output = _by_head(gradient, kv_heads)
        d_scores = torch.bmm(d_output, v.transpose(1, 2)).float()
        d_scores.sub_((d_output * output).sum(-1, dtype=torch.float32, keepdim=True))
        d_scores = d_scores.mul_(p).mul_(ctx.scale).to(q.dtype)
        d_query = torch.bmm(d_scores, k)
        d_key = torch.bmm(d_scores.transpose(1, 2), q)
        d_value = torch.bmm(p.transpose(1, 2), d_output)
        return (
            _by_token(d_query, kv_heads, length),
            _by_token(d_key, kv_heads, keys),
            _by_token(d_value, kv_heads, keys),
            None,
            None,
        )


def _by_head(rows: Tensor, kv_heads: int) -> Tensor:
    """Reshape [segments, length, heads, dim] to [segments * kv_heads, heads / kv_heads * length, dim]."""
    segments, length, heads, dim = rows.shape
    split = rows.reshape(segments, length, kv_heads, heads // kv_heads, dim)
    return split.permute(0, 2, 3, 1, 4).reshape(segments * kv_heads, -1, dim)


def _by_token(rows: Tensor, kv_heads: int, length: int) -> Tensor:
    """Reshape the result of `_by_head` back to [segments, length, heads, dim]."""
    segments, dim = len(rows) // kv_heads, rows.shape[-1]
    split = rows.view(segments, kv_heads, -1, length, dim)
    return split.permute(0, 3, 1, 2, 4).reshape(segments, length, -1, dim)
