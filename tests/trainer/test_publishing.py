"""Publishing of weights in the background, while the trainer trains on the next batch."""

import threading
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from buckeye.base.process import RunIdentity
from buckeye.base.storage import step_directories
from buckeye.errors import RunError, TransportError
from buckeye.monitor.metrics import MetricsLog
from buckeye.trainer.learner import Learner
from buckeye.trainer.output import writer as output_module
from buckeye.trainer.output.background_thread import BackgroundThread
from buckeye.trainer.output.broadcast import Broadcaster
from buckeye.trainer.output.stored_weights import StoredWeights, read_stored_weights
from buckeye.trainer.rl import run_trainer
from buckeye.transport.broadcast_group import BroadcastGroup
from buckeye.transport.checkpoint import resolve_checkpoint, trainer_state_directory
from buckeye.transport.weights import make_manifest, verify_weights
from buckeye.transport.weights_offer import (
    AcceptedGroup,
    accept_offer,
    accepted_group,
    find_offer,
    offer_weights,
    store_path,
    withdraw_offer,
)
from tests.trainer.rl_runs import put, records
from tests.trainer.trainer_config import trainer_config


def test_weights_are_written_without_a_progress_bar(tmp_path, train, batches, monkeypatch, capsys):
    monkeypatch.setattr("transformers.utils.logging._tqdm_active", True)
    train(tmp_path, batches[:1])
    assert "model shards" not in capsys.readouterr().err


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


def test_each_step_records_the_time_of_a_version_however_fast_it_is_written(
    tmp_path, train, batches, monkeypatch
):
    """Version 1 is written before the trainer continues, and version 2 after the record of the step."""
    start, recorded = BackgroundThread.start, threading.Event()
    publish, write = output_module.publish_weights, MetricsLog.write

    def start_and_wait(self, name, work):
        start(self, name, work)
        if name == "the weights of step 1":
            self.wait()

    def wait_and_publish(root, step, *args, **kwargs):
        assert step != 2 or recorded.wait(60)
        return publish(root, step, *args, **kwargs)

    def write_and_tell(self, process, step, *args):
        write(self, process, step, *args)
        if step == 1:
            recorded.set()

    monkeypatch.setattr(BackgroundThread, "start", start_and_wait)
    monkeypatch.setattr(output_module, "publish_weights", wait_and_publish)
    monkeypatch.setattr(MetricsLog, "write", write_and_tell)
    train(tmp_path, batches[:3])
    assert all(record.get("weights/publish_seconds", 0) > 0 for record in records(tmp_path))


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


def test_data_of_a_function_that_has_ended_is_released():
    """The copied state of a checkpoint is three times as large as the model."""
    state = threading.Event()
    released = threading.Event()
    weakref.finalize(state, released.set)
    background = BackgroundThread()
    background.start("the checkpoint of step 3", partial(bool, state))
    del state
    background.wait()
    assert released.wait(10)


def test_files_with_other_tensors_are_not_kept(tmp_path, build_model):
    """Saving may split a tensor, as transformers does with the experts of a mixture."""
    from transformers import Qwen3Config

    model = build_model(Qwen3Config)
    joined = {"model.embed_tokens.weight": torch.zeros(264, 32), "model.layers.weight": torch.zeros(2, 32)}
    assert read_stored_weights(model, joined, str, pinned=False) is None


@pytest.mark.parametrize("result", ["success", "no lock"])
def test_memory_for_weights_is_pinned_if_the_system_allows_it(monkeypatch, result):
    """The next kernel after a failure reports it again, which must not end the trainer."""
    pinned = []

    def register(address, size, flags):
        pinned.append((address, size, flags))
        return result

    def report(size, device):
        raise RuntimeError

    monkeypatch.setattr(torch, "zeros", report)
    cudart = SimpleNamespace(cudaHostRegister=register, cudaError=SimpleNamespace(success="success"))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    file = StoredWeights().add_file("model.safetensors", 5000, pinned=True)
    assert pinned == [(file.data_ptr(), 5000, 0)]


@pytest.mark.parametrize(
    ("transport", "has_files", "file_seconds", "has_adapter", "is_offered", "level"),
    [
        ("files", True, 60.0, False, False, "INFO"),
        ("broadcast", True, None, False, True, None),
        ("broadcast", False, None, False, False, "WARNING"),
        ("broadcast", True, None, True, False, "WARNING"),
        ("auto", True, 0.02, False, False, "INFO"),
        ("auto", True, 3.0, False, True, None),
        ("auto", True, 60.0, True, False, "INFO"),
        ("auto", True, None, False, False, None),
    ],
)
def test_transport_is_chosen_once(
    tmp_path, caplog, transport, has_files, file_seconds, has_adapter, is_offered, level
):
    stored = StoredWeights() if has_files else None
    broadcaster = Broadcaster(tmp_path, transport, has_adapter=has_adapter)
    with caplog.at_level("INFO"):
        broadcaster.choose(stored, file_seconds)
        if file_seconds is not None:
            broadcaster.choose(stored, 60.0 if level else 0.0)
    assert broadcaster.is_used is is_offered
    assert [record.levelname for record in caplog.records] == ([] if level is None else [level])


def test_auto_uses_files_if_engines_on_other_machines_would_wait_longer(tmp_path, caplog, monkeypatch):
    """Shared memory would be faster than files, and a broadcast is not."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    stored, me = StoredWeights(), RunIdentity(run_id="a", attempt=1)
    stored.add_file("model.safetensors", 5000, pinned=False)[:] = 7
    broadcaster = Broadcaster(tmp_path, "auto", has_adapter=False)
    broadcaster.choose(stored, 0.3)
    assert broadcaster.is_used
    broadcaster.offer(make_manifest(1, stored.digests(), identity=me, dtype="float32"), stored)
    offer = find_offer(tmp_path, identity=me)
    assert accept_offer(tmp_path, offer, AcceptedGroup(size=2, loopback=False))
    with caplog.at_level("INFO"):
        group = BroadcastGroup(store_path(tmp_path, offer.store), 1, 2, loopback=False, seconds=30)
        assert group.receive(offer.sizes, {}, copies=True)["model.safetensors"].sum() == 35_000
        group.finish()
        broadcaster.finish()
    assert not broadcaster.is_used
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_offer_is_accepted_or_withdrawn(tmp_path):
    """One of the two succeeds, and an offer of another attempt is not found."""
    me = RunIdentity(run_id="a", attempt=2)
    manifest = make_manifest(3, {"model.safetensors": "0" * 64}, identity=me, dtype="float32")
    group = AcceptedGroup(size=3, loopback=True)
    first = offer_weights(tmp_path, manifest, {"model.safetensors": 9}, {})
    assert find_offer(tmp_path, identity=RunIdentity(run_id="a", attempt=1)) is None
    assert find_offer(tmp_path, identity=me) == first
    assert accepted_group(tmp_path, first) is None
    assert accept_offer(tmp_path, first, group)
    assert not withdraw_offer(tmp_path, first)
    assert accepted_group(tmp_path, first) == group
    second = offer_weights(tmp_path, manifest, {"model.safetensors": 9}, {})
    assert not accept_offer(tmp_path, first, group)  # it does not accept the second one
    assert withdraw_offer(tmp_path, second)
    assert not accept_offer(tmp_path, second, group)
    third = offer_weights(tmp_path, manifest, {"model.safetensors": 9}, {})
    (tmp_path / "broadcast" / f"group_{third.store}.json").mkdir()  # like a full disk
    assert not accept_offer(tmp_path, third, group)
    assert withdraw_offer(tmp_path, third)
    assert find_offer(tmp_path, identity=me) is None
