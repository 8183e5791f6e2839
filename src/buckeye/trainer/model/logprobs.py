"""Log-probs and entropies from hidden states, without storing all logits.

For a token y with final hidden state h, output projection W and sampling temperature T, z = W h / T and

    log p(y) = z_y - logsumexp(z)          d log p(y) / dz = 1[y] - p
    H        = -sum_v p_v log p_v          dH / dz         = -p * (log p + H)

The logits of one chunk of tokens are in memory at a time. The backward pass recomputes them, unless there is
only one chunk. All chunks use the same buffers, because allocating memory takes longer than writing to it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_CHUNK_BYTES = 128 * 2**20
_CHUNK_BYTES_ON_GPU = 512 * 2**20  # larger, because every chunk reads and writes the whole gradient of W
_CHUNK_TOKENS = 1024  # more tokens do not make the matrix product faster
_CHUNK_MULTIPLE = 16  # some other numbers of tokens make the matrix product a third slower on CPUs
_BLOCK_ROWS = 4096  # rows of W whose gradient fits the cache of a processor


def token_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor, *, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the log-prob of each target and the entropy of its distribution, both [N] and differentiable.

    `hidden` is [N, H] in the compute dtype, `weight` [V, H], `targets` i64[N], and `temperatures` [N] is
    positive. The projection is computed in the dtype of `hidden`, and the softmax in float32 or better. A
    chunk has `chunk` tokens. By default it has 1,024 tokens, or fewer if their logits exceed 128 MiB (512 MiB
    on a GPU).
    """
    size = _CHUNK_BYTES_ON_GPU if hidden.is_cuda else _CHUNK_BYTES
    most = min(_CHUNK_TOKENS, size // (4 * weight.shape[0]))
    rows = chunk or max(1, most - most % _CHUNK_MULTIPLE)
    changed = bool((temperatures != 1).any())
    return _TokenLogprobs.apply(hidden, weight, targets, temperatures if changed else None, rows)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor | None, rows: int
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.rows = rows
        cast = weight.to(hidden.dtype)
        logprobs = hidden.new_empty(len(targets), dtype=torch.promote_types(hidden.dtype, torch.float32))
        normalizers, entropies = torch.empty_like(logprobs), torch.empty_like(logprobs)
        buffers = _buffers(2, min(len(targets), rows), weight, precise=logprobs, hidden=hidden)
        log_p = buffers[1]
        for piece in _slices(len(targets), rows):
            logits, log_p, product = (buffer[: len(targets[piece])] for buffer in buffers)
            temperature = None if temperatures is None else temperatures[piece]
            _logits(hidden[piece], cast, temperature, product=product, out=logits)
            torch.log_softmax(logits, dim=-1, out=log_p)
            logprobs[piece] = log_p.gather(1, targets[piece, None]).squeeze(1)
            normalizers[piece] = logits.gather(1, targets[piece, None]).squeeze(1) - logprobs[piece]
            entropies[piece] = -torch.bmm(log_p[:, None], torch.exp(log_p, out=logits)[:, :, None]).flatten()
        kept = log_p if len(targets) <= rows else None  # the buffer of a single chunk is still valid
        ctx.save_for_backward(hidden, weight, cast, targets, temperatures, normalizers, entropies, kept)
        return logprobs, entropies

    @staticmethod
    def backward(
        ctx: Any, d_logprobs: Tensor | None, d_entropies: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, cast, targets, temperatures, normalizers, entropies, kept = ctx.saved_tensors
        d_hidden = torch.zeros_like(hidden)
        d_weight = None
        if ctx.needs_input_grad[1]:  # a sum over many chunks needs float32, even for a 16-bit weight
            d_weight = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        if temperatures is not None:
            d_logprobs, d_entropies = (
                None if d is None else d / temperatures for d in (d_logprobs, d_entropies)
            )
        buffers = _buffers(1, min(len(targets), ctx.rows), weight, precise=normalizers, hidden=hidden)
        for piece in _slices(len(targets), ctx.rows):
            log_p, product = (buffer[: len(targets[piece])] for buffer in buffers)
            if kept is None:
                temperature = None if temperatures is None else temperatures[piece]
                _logits(hidden[piece], cast, temperature, product=product, out=log_p)
                log_p.sub_(normalizers[piece, None])
            else:
                log_p.copy_(kept)
            d_logits = _d_logits(
                log_p,
                targets[piece],
                entropies[piece],
                None if d_logprobs is None else d_logprobs[piece],
                None if d_entropies is None else d_entropies[piece],
            )
            if d_logits.dtype != hidden.dtype:
                d_logits = product.copy_(d_logits)
            d_hidden[piece] = d_logits @ cast
            if d_weight is not None:
                _accumulate(d_weight, d_logits, hidden[piece])
        return d_hidden, None if d_weight is None else d_weight.to(weight.dtype), None, None, None


def _accumulate(total: Tensor, d_logits: Tensor, hidden: Tensor) -> None:
    """Add d_logits^T hidden, the gradient of W, to `total`."""
    if total.dtype == hidden.dtype:
        total.addmm_(d_logits.t(), hidden)  # in place, because the product is as large as the weight
        return
    # On a CPU, the sum converts the product to the dtype of `total` first. Blocks stay in the cache.
    rows = len(total) if total.is_cuda else _BLOCK_ROWS
    for block, columns in zip(total.split(rows), d_logits.split(rows, dim=1), strict=True):
        block += columns.t() @ hidden


def _slices(total: int, rows: int) -> list[slice]:
    return [slice(start, start + rows) for start in range(0, total, rows)]


def _buffers(count: int, rows: int, weight: Tensor, *, precise: Tensor, hidden: Tensor) -> list[Tensor]:
    """Return `count` buffers for logits in the dtype of `precise`, and one for products in that of `hidden`.

    Each is [rows, vocabulary]. If the dtypes are equal, the last one is empty, because it is not needed.
    """
    products = 0 if hidden.dtype == precise.dtype else rows
    buffers = [precise.new_empty(rows, len(weight)) for _ in range(count)]
    return [*buffers, hidden.new_empty(products, len(weight))]


def _logits(
    hidden: Tensor, weight: Tensor, temperatures: Tensor | None, *, product: Tensor, out: Tensor
) -> None:
    """Write logits to `out`, through the buffer `product` if `hidden` has another dtype."""
    if out.dtype == hidden.dtype:
        torch.mm(hidden, weight.t(), out=out)
    else:
        out.copy_(torch.mm(hidden, weight.t(), out=product))
    if temperatures is not None:
        out.div_(temperatures[:, None])


def _d_logits(
    log_p: Tensor,
    targets: Tensor,
    entropies: Tensor,
    d_logprobs: Tensor | None,
    d_entropies: Tensor | None,
) -> Tensor:
    """Return the gradient of the logits before division by the temperature, [tokens, vocabulary].

    `d_logprobs` and `d_entropies` must already be divided by the temperature. The function overwrites
    `log_p`.
    """
    if d_entropies is None:
        p = log_p.exp_()
        d_logits = p.zero_() if d_logprobs is None else p.mul_(-d_logprobs[:, None])
    else:
        factor = (log_p + entropies[:, None]).mul_(-d_entropies[:, None])
        d_logits = factor if d_logprobs is None else factor.sub_(d_logprobs[:, None])
        d_logits.mul_(log_p.exp_())
    if d_logprobs is not None:
        d_logits.scatter_add_(1, targets[:, None], d_logprobs[:, None])
    return d_logits
