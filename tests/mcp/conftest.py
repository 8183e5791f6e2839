"""Fixtures of other rooms' tests: a tiny model, and `rl` on it."""

from tests.run.conftest import finished, runner, start, tiny_model

__all__ = ["finished", "runner", "start", "tiny_model"]
