"""Fixtures of other rooms' tests: a tiny model, and `rl` on it."""

from tests.run.conftest import finished, runner, tiny_model

__all__ = ["finished", "runner", "tiny_model"]
