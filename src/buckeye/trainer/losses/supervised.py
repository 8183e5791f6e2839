"""Cross-entropy on conversations, which an update adds to the loss of its rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from buckeye.trainer.data.chat_data import ChatSample


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SupervisedSamples:
    """Samples of the conversations of an update, and the weight of their loss."""

    samples: Sequence[ChatSample]
    coef: float

    @property
    def tokens(self) -> int:
        """Number of trained tokens of all samples."""
        return sum(int(sample.loss_mask.sum()) for sample in self.samples)

    def loss(self, logprobs: Tensor) -> Tensor:
        """Return -coef * sum(log pi_t) / tokens, for the log-probs [N] of trained tokens of some samples.

        The divisor counts the trained tokens of all samples on all ranks, and no tokens of rollouts.
        """
        return -self.coef * logprobs.sum() / max(1, self.tokens)
