"""Dakota grammar as verifiable tasks, generated from the 19th-century record.

`verifiers` imports this module: `load_environment` for its v0 API, `DakotaTaskset` for v1. Buckeye's
environment is `dakota1890.environment.load_environment`. Each is imported on first access.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dakota1890.verifiers_v1 import DakotaTaskset

__all__ = ["DakotaTaskset"]
__version__ = "0.1.20"


def load_environment(**arguments: Any) -> Any:
    """Return the environment for `verifiers` v0, with the arguments of `dakota1890.verifiers_v0`.

    Raises VerifiersError, with the package to install, if no `verifiers` with that API is installed.
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
