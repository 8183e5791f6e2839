"""Policy-gradient losses: pure functions of log-probs, one per formula of docs/reference/losses.md.

They take flat tensors of the N trained tokens of a row. The caller divides the sums by a count over the whole
batch.
"""

from buckeye.trainer.losses.base import LossInputs

__all__ = ["LossInputs"]
