"""Policy-gradient losses: a pure function for each formula of docs/reference/losses.md.

The functions get tensors [N] for the N trained tokens of a row, and return the loss of each token.
"""

from buckeye.trainer.losses.base import LossInputs

__all__ = ["LossInputs"]
