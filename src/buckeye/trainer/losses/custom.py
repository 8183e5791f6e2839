"""A loss that is a function of the user's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from buckeye.config.losses import CustomLossConfig
from buckeye.errors import UsageError
from buckeye.own_function import load_own_function
from buckeye.trainer.losses.base import LossInputs, TokenLosses

_SETTING = "trainer.loss"


def custom_loss(inputs: LossInputs, config: CustomLossConfig) -> TokenLosses:
    """What `function(inputs, **kwargs)` says: a differentiable tensor [N], the loss of each token.

    Raises `UsageError` if it says something else.
    """
    values = load_custom_loss(config)(inputs, **config.kwargs)
    if not isinstance(values, Tensor) or values.shape != inputs.logprobs.shape:
        found = f"a tensor {list(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        raise UsageError(
            f"{_SETTING}.import_path = {config.import_path!r} returned {found}; expected one loss per "
            f"token, a tensor {list(inputs.logprobs.shape)}. The batch is averaged after it, as "
            "`normalization` says."
        )
    return TokenLosses(policy=values)


def load_custom_loss(config: CustomLossConfig) -> Callable[..., Any]:
    """The function that the settings name. `UsageError` if it is not there or does not take the arguments."""
    return load_own_function(config.import_path, config.kwargs, setting=_SETTING)
