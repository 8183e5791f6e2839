"""Fixtures of other rooms' tests: the trainer's tiny model, with batches for it."""

from tests.trainer.conftest import _environment, _one_thread, batches, build_model, tiny_model

__all__ = ["_environment", "_one_thread", "batches", "build_model", "tiny_model"]
