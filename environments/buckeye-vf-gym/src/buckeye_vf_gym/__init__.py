"""Buckeye's MCP environments for `verifiers`.

`verifiers` imports this module: `load_environment` for its v0 API, `GymTaskset` and `GymHarness` for v1. Each
is imported on first access.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from buckeye.errors import UsageError

if TYPE_CHECKING:
    from buckeye_vf_gym.v1 import GymHarness, GymTaskset

__all__ = ["GymHarness", "GymTaskset"]
__version__ = "0.1.0"

_REQUIREMENTS = {
    "v0": ("verifiers", "MultiTurnEnv", "verifiers>=0.1.14,<0.2"),
    "v1": ("verifiers.v1", "TaskData", "verifiers>=0.4,<0.5"),
}
"""Module, a name in it, and the packages to install, for each API."""


def load_environment(**arguments: Any) -> Any:
    """Return the environment for `verifiers` v0, with the arguments of `buckeye_vf_gym.v0.load_environment`.

    Raises UsageError, with the packages to install, if no `verifiers` with that API is installed.
    """
    _require("v0")
    from buckeye_vf_gym.v0 import load_environment as load

    return load(**arguments)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _require("v1")
    return getattr(importlib.import_module("buckeye_vf_gym.v1"), name)


def _require(api: str) -> None:
    module, name, requirement = _REQUIREMENTS[api]
    try:
        is_installed = hasattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name not in ("verifiers", "verifiers.v1"):
            raise
        is_installed = False
    if not is_installed:
        raise UsageError(
            f"no verifiers with the {api} API is installed",
            code="BK-PACKAGE-MISSING",
            hint=f"install it: pip install '{requirement}'",
        )
