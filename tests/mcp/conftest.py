"""A tiny model, and `rl` on it, are those of the core's tests."""

from tests.run.conftest import finished, runner, start, tiny_model

__all__ = ["finished", "runner", "start", "tiny_model"]
