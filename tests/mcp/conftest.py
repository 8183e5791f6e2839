"""A tiny model, and `rl` on it, are those of the core's tests."""

from tests.run.conftest import finished, runner, tiny_model

__all__ = ["finished", "runner", "tiny_model"]
