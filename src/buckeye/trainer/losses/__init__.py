"""Policy-gradient losses: pure functions of log-probs, one per formula of docs/reference/losses.md.

They take flat tensors of the N trained tokens of a row. The caller divides the sums by a count over the whole
batch.
"""

from buckeye.trainer.losses.base import LossInputs, LossSums, TokenLosses
from buckeye.trainer.losses.policy_gradient import (
    LOSS_TYPES,
    check_loss,
    divisor,
    needs_every_sample,
    statistic_names,
    total_loss,
)
from buckeye.trainer.losses.statistics import averages, ratio_range

__all__ = [
    "LOSS_TYPES",
    "LossInputs",
    "LossSums",
    "TokenLosses",
    "averages",
    "check_loss",
    "divisor",
    "needs_every_sample",
    "ratio_range",
    "statistic_names",
    "total_loss",
]
