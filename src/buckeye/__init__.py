"""Buckeye: reinforcement learning for language-model agents that works the first time."""

from __future__ import annotations

from typing import Any

from buckeye.version import __version__

__all__ = ["__version__", "load_environment"]


def load_environment(env_id: str, **args: Any) -> Any:
    """Load an installed environment by its id, with arguments for its loader.

    Raise `UsageError` if it cannot be loaded.
    """
    from buckeye.workers.loading import load_environment as load

    return load(env_id, **args)
