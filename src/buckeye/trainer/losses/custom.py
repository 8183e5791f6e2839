"""A loss that is a function of the user's."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

from buckeye.config.losses import CustomLossConfig
from buckeye.errors import UsageError
from buckeye.trainer.losses.base import LossInputs, TokenLosses

_SETTING = "trainer.loss.import_path"


def custom_loss(inputs: LossInputs, config: CustomLossConfig) -> TokenLosses:
    """What `function(inputs, **kwargs)` says: a differentiable tensor [N], the loss of each token.

    Raises `UsageError` if it says something else.
    """
    values = load_custom_loss(config)(inputs, **config.kwargs)
    if not isinstance(values, Tensor) or values.shape != inputs.logprobs.shape:
        found = f"a tensor {list(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        raise UsageError(
            f"{_SETTING} = {config.import_path!r} returned {found}; expected one loss per token, a tensor "
            f"{list(inputs.logprobs.shape)}. The batch is averaged after it, as `normalization` says."
        )
    return TokenLosses(policy=values)


def load_custom_loss(config: CustomLossConfig) -> Callable[..., Any]:
    """The function that the settings name. `UsageError` if it is not there or does not take the arguments."""
    function = _load(config.import_path)
    try:
        inspect.signature(function).bind(None, **config.kwargs)
    except TypeError as error:
        raise UsageError(
            f"{_SETTING} = {config.import_path!r} cannot be called with the loss's inputs and "
            f"trainer.loss.kwargs = {config.kwargs}: {error}."
        ) from None
    return function


@cache
def _load(import_path: str) -> Callable[..., Any]:
    source, _, name = import_path.rpartition(":")
    try:
        module = _from_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    except Exception as error:
        raise UsageError(
            f"{_SETTING} = {import_path!r}: {source} cannot be imported ({type(error).__name__}: {error})."
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"{_SETTING} = {import_path!r}: {source} has no function {name!r}.")
    return function  # type: ignore[no-any-return]


def _from_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path.expanduser())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
