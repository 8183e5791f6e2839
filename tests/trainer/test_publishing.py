"""Publishing of weights in the background, while the trainer trains on the next batch."""

import threading

import pytest
import torch

from buckeye.base.storage import step_directories
from buckeye.errors import RunError, TransportError
from buckeye.trainer.learner import Learner
from buckeye.trainer.output import writer as output_module
from buckeye.trainer.output.stored_weights import read_stored_weights
from buckeye.trainer.output.writer import BackgroundThread
from buckeye.trainer.rl import run_trainer
from buckeye.transport.checkpoint import resolve_checkpoint, trainer_state_directory
from buckeye.transport.weights import verify_weights
from tests.trainer.rl_runs import put, records
from tests.trainer.trainer_config import trainer_config


def test_training_continues_while_weights_are_written(tmp_path, train, batches, monkeypatch):
    """The writer of version 1 waits until step 1 is trained, and still writes the weights after step 0."""
    trained = threading.Event()
    publish, finish = output_module.publish_weights, Learner.finish_step

    def wait_and_publish(root, step, *args, **kwargs):
        assert step != 1 or trained.wait(60)
        return publish(root, step, *args, **kwargs)

    def finish_and_tell(self, *args, **kwargs):
        values = finish(self, *args, **kwargs)
        if self.progress.step == 2:
            trained.set()
        return values

    monkeypatch.setattr(output_module, "publish_weights", wait_and_publish)
    monkeypatch.setattr(Learner, "finish_step", finish_and_tell)
    train(tmp_path, batches[:3], ckpt={"interval": 1})
    assert list(step_directories(tmp_path / "weights")) == [1, 2, 3]
    for step in (1, 2, 3):
        directory = tmp_path / "weights" / f"step_{step}"
        verify_weights(directory)
        # transformers wrote the checkpoint, so the files of both must be equal
        model = trainer_state_directory(resolve_checkpoint(tmp_path / "checkpoints", step)) / "model"
        for path in model.iterdir():
            assert (directory / path.name).read_bytes() == path.read_bytes()
    times = [record.get("weights/publish_seconds", 0) for record in records(tmp_path)]
    assert all(seconds > 0 for seconds in times)


def test_publish_error_ends_the_trainer_that_waits_for_a_batch(
    tmp_path, tiny_model, batches, monkeypatch, refusal
):
    publish = output_module.publish_weights

    def fail(root, step, *args, **kwargs):
        if step == 1:
            raise TransportError("the disk is made of cheese")
        return publish(root, step, *args, **kwargs)

    monkeypatch.setattr(output_module, "publish_weights", fail)
    put(tmp_path, batches[:1])
    with refusal(TransportError):
        run_trainer(trainer_config(tiny_model, tmp_path, max_steps=4, batch_timeout=600))
    assert (tmp_path / "batches" / "step_0").exists()


def test_background_thread_that_hangs_is_reported(refusal):
    never = threading.Event()
    background = BackgroundThread(timeout=0.2)
    background.start("the weights of step 3", lambda: bool(never.wait(600)) and None)
    with refusal(RunError):
        background.wait()
    never.set()


def test_function_after_a_failed_one_is_not_called():
    def fail() -> None:
        raise ValueError("no")

    called: list[int] = []
    background = BackgroundThread()
    background.start("weights", fail)
    background.then(lambda: called.append(1))
    with pytest.raises(ValueError, match="no"):
        background.wait()
    assert called == []


def test_files_with_other_tensors_are_not_kept(tmp_path, build_model):
    """Saving may split a tensor, as transformers does with the experts of a mixture."""
    from transformers import Qwen3Config

    model = build_model(Qwen3Config)
    joined = {"model.embed_tokens.weight": torch.zeros(264, 32), "model.layers.weight": torch.zeros(2, 32)}
    assert read_stored_weights(model, joined, str, pinned=False) is None
