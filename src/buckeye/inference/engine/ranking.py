"""The most likely tokens beside the sampled one, for the requests that ask for them."""

from __future__ import annotations

import torch

from buckeye.inference.engine.sampling import SamplingBatch, truncate
from buckeye.inference.engine.sequences import Sequence


class Ranking:
    """The running sequences that want to know the most likely tokens."""

    def __init__(self) -> None:
        self._sequences: dict[Sequence, None] = {}

    def add(self, sequence: Sequence) -> None:
        """Take in a sequence that begins, if it wants to know."""
        if sequence.params.top_logprobs:
            self._sequences[sequence] = None

    def discard(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        self._sequences.pop(sequence, None)

    def tell(self, logits: torch.Tensor, batch: SamplingBatch) -> None:
        """Append to each sequence what is most likely in its row of the logits, float32 [B, V]."""
        if not self._sequences:
            return
        rows = torch.tensor([sequence.slot for sequence in self._sequences], device=logits.device)
        count = max(sequence.params.top_logprobs for sequence in self._sequences)
        tokens, logprobs = (part.tolist() for part in top_tokens(logits, batch, rows, count))
        for sequence, *best in zip(self._sequences, tokens, logprobs, strict=True):
            sequence.top_logprobs.append(list(zip(*best, strict=True))[: sequence.params.top_logprobs])


def top_tokens(
    logits: torch.Tensor, batch: SamplingBatch, rows: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` most likely tokens of the rows `rows` (int64 [R]) of logits (float32 [B, V]), best first.

    Returns tokens, int64 [R, count], and their log-probs, float64 [R, count], under the distribution that is
    drawn from; a token that cannot be drawn has minus infinity.
    """
    logits = logits[rows]
    if batch.inverse_temperature is not None:
        logits.mul_(batch.inverse_temperature[rows])
    weights = logits.sub_(logits.amax(-1, keepdim=True)).exp_()
    if batch.top_k is not None and batch.top_p is not None:
        weights = truncate(weights, batch.top_k[rows], batch.top_p[rows])
    best, tokens = weights.topk(min(count, weights.shape[1]))
    return tokens, best.double().log() - weights.sum(-1, keepdim=True, dtype=torch.float64).log()
