"""Buckeye: reinforcement learning for language-model agents that works the first time."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from buckeye.version import __version__

if TYPE_CHECKING:
    from buckeye.api.run import TrainingRun, open_run
    from buckeye.api.train import evaluate, train
    from buckeye.workers.loading import load_environment

__all__ = ["TrainingRun", "__version__", "evaluate", "load_environment", "open_run", "train"]

_MODULES = {
    "TrainingRun": "buckeye.api.run",
    "evaluate": "buckeye.api.train",
    "load_environment": "buckeye.workers.loading",
    "open_run": "buckeye.api.run",
    "train": "buckeye.api.train",
}


def __getattr__(name: str) -> Any:
    """Import a public name on its first use, so that `import buckeye` is quick."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
