"""Log-probabilities and entropies from hidden states, without ever holding all logits.

For a token y with final hidden state h, output projection W and sampling temperature T, z = W h / T and

    log p(y) = z_y - logsumexp(z)          d log p(y) / dz = 1[y] - p
    H        = -sum_v p_v log p_v          dH / dz         = -p * (log p + H)

The logits exist for `chunk` tokens at a time; the backward pass computes them again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_CHUNK_BYTES = 64 * 2**20


def token_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor, *, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of its distribution, both [N] and differentiable.

    `hidden` [N, H] in the compute dtype; `weight` [V, H]; `targets` i64[N]; `temperatures` [N], positive.
    The projection is computed in `hidden`'s dtype, the softmax in float32 or better. `chunk` is the number of
    tokens whose logits exist at one time; by default they fill 64 MiB.
    """
    rows = chunk or max(1, _CHUNK_BYTES // (4 * weight.shape[0]))
    return _TokenLogprobs.apply(hidden, weight, targets, temperatures, rows)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor, rows: int
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.rows = rows
        cast = weight.to(hidden.dtype)
        precise = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = hidden.new_empty(len(targets), dtype=precise)
        entropies = torch.empty_like(logprobs)
        for piece in _slices(len(targets), rows):
            log_p = _log_softmax(hidden[piece], cast, temperatures[piece])
            logprobs[piece] = log_p.gather(1, targets[piece, None]).squeeze(1)
            entropies[piece] = _entropy(log_p)
        ctx.save_for_backward(hidden, weight, targets, temperatures, entropies)
        return logprobs, entropies

    @staticmethod
    def backward(
        ctx: Any, d_logprobs: Tensor | None, d_entropies: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, temperatures, entropies = ctx.saved_tensors
        cast = weight.to(hidden.dtype)
        d_hidden = torch.zeros_like(hidden)
        d_weight = torch.zeros_like(weight)
        for piece in _slices(len(targets), ctx.rows):
            log_p = _log_softmax(hidden[piece], cast, temperatures[piece])
            p = log_p.exp()
            d_logits = torch.zeros_like(p)
            if d_logprobs is not None:
                grad = d_logprobs[piece, None]
                d_logits -= p * grad
                d_logits.scatter_add_(1, targets[piece, None], grad)
            if d_entropies is not None:
                d_logits -= p * (log_p + entropies[piece, None]) * d_entropies[piece, None]
            d_logits = (d_logits / temperatures[piece, None]).to(hidden.dtype)
            d_hidden[piece] = d_logits @ cast
            d_weight += d_logits.t() @ hidden[piece]
        return d_hidden, d_weight, None, None, None


def _slices(total: int, rows: int) -> list[slice]:
    return [slice(start, start + rows) for start in range(0, total, rows)]


def _log_softmax(hidden: Tensor, weight: Tensor, temperatures: Tensor) -> Tensor:
    logits = hidden @ weight.t()
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.log_softmax(logits / temperatures[:, None], dim=-1)


def _entropy(log_p: Tensor) -> Tensor:
    # xlogy-like: a probability of 0 (log-probability -inf) contributes nothing
    return -(log_p.exp() * log_p.clamp_min(torch.finfo(log_p.dtype).min)).sum(-1)
