"""Dakota grammar as verifiable tasks, generated from the 19th-century record.

This module is what `verifiers` imports: `load_environment` for its v0 API, `DakotaTaskset` for v1. Buckeye's
environment is `dakota1890.environment.load_environment`. Nothing is imported before it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dakota1890.verifiers_v1 import DakotaTaskset

__all__ = ["DakotaTaskset"]
__version__ = "0.1.20"


def load_environment(**arguments: Any) -> Any:
    """The environment for `verifiers` v0; see `dakota1890.verifiers_v0.load_environment` for the arguments.

    Raises VerifiersError, with what to install, if there is no `verifiers` with that API.
    """
    from dakota1890.rows import require_verifiers

    require_verifiers("v0")
    from dakota1890.verifiers_v0 import load_environment as load

    return load(**arguments)


def __getattr__(name: str) -> Any:
    if name != "DakotaTaskset":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dakota1890.rows import require_verifiers

    require_verifiers("v1")
    from dakota1890.verifiers_v1 import DakotaTaskset

    return DakotaTaskset
