"""The trainer's tiny model, with batches for it, are those of the core's tests."""

from tests.trainer.conftest import _environment, _one_thread, batches, build_model, tiny_model

__all__ = ["_environment", "_one_thread", "batches", "build_model", "tiny_model"]
