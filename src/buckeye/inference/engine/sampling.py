"""Sampling of tokens from logits, for a whole batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

_BLOCK = 64
_BELOW_ONE = 1.0 - 2.0**-53
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingBatch:
    """Sampling settings of B sequences. A field is None if no sequence needs its operation.

    inverse_temperature: float32 [B, 1], with 1 for greedy sequences. greedy: bool [B]. top_k: int64 [B, 1]
    and top_p: float64 [B, 1] are both set or both None. A sequence without truncation has the vocabulary size
    as `top_k`, and 2 as `top_p`.
    """

    inverse_temperature: torch.Tensor | None
    greedy: torch.Tensor | None
    top_k: torch.Tensor | None
    top_p: torch.Tensor | None


def sampling_batch(
    temperature: npt.NDArray[np.float32],
    top_k: npt.NDArray[np.int64],
    top_p: npt.NDArray[np.float64],
    *,
    vocab: int,
    device: torch.device,
) -> SamplingBatch:
    """Return the settings of B sequences as tensors.

    A `top_k` of 0 or less and a `top_p` of 1 do not truncate.
    """
    greedy = temperature == 0
    inverse = 1 / np.where(greedy, np.float32(1), temperature)
    truncated = ~greedy & ((top_p < 1) | ((top_k > 0) & (top_k < vocab)))
    top_k = np.where(truncated & (top_k > 0), top_k, vocab)
    top_p = np.where(truncated & (top_p < 1), top_p, 2.0)

    def column(values: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values[:, None]).to(device)

    return SamplingBatch(
        inverse_temperature=column(inverse) if (inverse != 1).any() else None,
        greedy=torch.from_numpy(greedy).to(device) if greedy.any() else None,
        top_k=column(top_k) if truncated.any() else None,
        top_p=column(top_p) if truncated.any() else None,
    )


def mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scramble 64-bit integers bijectively (the finalizer of splitmix64, Steele et al. 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def uniforms(streams: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) for each (stream, position).

    Each number depends only on its stream and position, not on earlier calls. A stream is a seed after
    `mix`.
    """
    bits = mix(streams + positions.astype(np.uint64) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample(
    logits: torch.Tensor, batch: SamplingBatch, random: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token per row of logits (float32 [B, V], overwritten).

    `random` has one random number per row (float64 [B]).

    Return tokens, int64 [B], and their log-probs, float64 [B], under the sampling distribution. If the logits
    of a row have NaN or infinity as their maximum, its log-prob is not finite.
    """
    if batch.inverse_temperature is not None:
        logits.mul_(batch.inverse_temperature)
    greedy_tokens = logits.argmax(-1) if batch.greedy is not None else None
    weights = logits.sub_(logits.amax(-1, keepdim=True)).exp_()
    if batch.top_k is not None and batch.top_p is not None:
        weights = truncate(weights, batch.top_k, batch.top_p)
    tokens, totals = _draw(weights, random)
    if batch.greedy is not None and greedy_tokens is not None:
        tokens = torch.where(batch.greedy, greedy_tokens, tokens)
    chosen = weights.gather(1, tokens[:, None])[:, 0].double()
    return tokens, chosen.log() - totals.log()


def truncate(weights: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return the weights, with 0 for every token that top-k or top-p excludes.

    Top-p keeps the smallest set of tokens that has the share `top_p` of the weight that top-k leaves. Of
    tokens with equal weights, the lowest token id ranks first.
    """
    ranked, order = weights.sort(dim=-1, descending=True, stable=True)
    ranked = ranked.masked_fill(torch.arange(ranked.shape[1], device=ranked.device) >= top_k, 0.0)
    up_to = ranked.double().cumsum(-1)
    before = up_to - ranked
    ranked = ranked.masked_fill(before >= top_p * up_to[:, -1:], 0.0)
    return torch.zeros_like(weights).scatter_(1, order, ranked)


def _draw(weights: torch.Tensor, random: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token per row: the token at which the cumulative weight exceeds `random` * total weight.

    The function first finds the block of 64 tokens, and then the token in the block. Cumulative sums are
    float64, so that a large vocabulary causes no rounding error.

    Return tokens, int64 [B], and the row sums, float64 [B]. A token of weight 0 is never sampled.
    """
    count, vocab = weights.shape
    if vocab % _BLOCK:
        weights = F.pad(weights, (0, _BLOCK - vocab % _BLOCK))
    blocks = weights.view(count, -1, _BLOCK)
    sums = blocks.sum(-1).double()
    ends = sums.cumsum(-1)
    target = random[:, None] * ends[:, -1:]
    block = torch.searchsorted(ends, target, right=True).clamp_(max=ends.shape[1] - 1)
    start = torch.where(block > 0, ends.gather(1, (block - 1).clamp_(min=0)), 0.0)
    inside = blocks.gather(1, block[..., None].expand(-1, -1, _BLOCK))[:, 0].double().cumsum(-1)
    # The sum of a block in `sums` and in `inside` may differ in the last bit. So clamp the target to the
    # block.
    rest = torch.minimum(target - start, inside[:, -1:] * _BELOW_ONE)
    index = torch.searchsorted(inside, rest, right=True).clamp_(max=_BLOCK - 1)
    tokens = (block * _BLOCK + index)[:, 0].clamp_(max=vocab - 1)  # clamps matter only for rows of NaN
    return tokens, ends[:, -1]
