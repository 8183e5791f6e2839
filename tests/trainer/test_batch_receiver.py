"""Waits for a batch have a deadline and a reason, and end on all ranks together."""

import threading
import time

import numpy as np
import pytest
import torch

from buckeye.base.process import RunIdentity, StopFlag
from buckeye.errors import TransportError
from buckeye.trainer import batch_receiver
from buckeye.trainer.batch_receiver import BatchReceiver
from buckeye.trainer.parallel.ranks import Ranks
from buckeye.transport.batches import Batch, Sample, pack_samples, write_batch
from tests.waiting import HANG

ME = RunIdentity(run_id="run", attempt=1)


class OtherRanks:
    """Ranks as seen by one that is not the first; `answer` is the value of the other ranks."""

    is_rank_zero = False
    world_size = 2

    def __init__(self, answer: int) -> None:
        self.answer = answer

    def max(self, value: int) -> int:
        return max(value, self.answer)

    def broadcast(self, data: bytes | None) -> bytes:
        assert data is None
        return pack_samples(_batch(step=0).samples)


def _receiver(root, *, ranks=None, timeout=0.2) -> BatchReceiver:
    ranks = ranks or Ranks(0, 1, torch.device("cpu"))
    skipped = root / "skipped"
    return BatchReceiver(
        root=root,
        skipped=skipped,
        identity=ME,
        ranks=ranks,
        stop=StopFlag(),
        timeout_seconds=timeout,
        check=lambda: None,
    )


def _put(root):
    return write_batch(root, _batch(step=0), identity=ME)


def _batch(step):
    arrays = {"loss_mask": np.array([False, True]), "versions": np.zeros(2, np.int32)}
    arrays |= {name: np.zeros(2, np.float32) for name in ("logprobs", "advantages")}
    sample = Sample(token_ids=np.zeros(2, np.int32), temperature=1.0, **arrays)
    return Batch(step=step, samples=(sample,), orchestrator_state={})


def test_receiver_times_out_with_a_message(tmp_path, refusal):
    with refusal(TransportError):
        _receiver(tmp_path).next_batch(7)


def test_stop_request_ends_the_wait(tmp_path):
    waiting = _receiver(tmp_path)
    waiting.stop.requested = True
    assert waiting.next_batch(0) is None


def test_damaged_batch_is_quarantined_and_read_after_a_rewrite(tmp_path):
    (_put(tmp_path) / "batch.safetensors").write_bytes(b"x")
    again = threading.Thread(target=_put_when_gone, args=(tmp_path,))
    again.start()
    batch = _receiver(tmp_path, timeout=HANG).next_batch(0)
    again.join()
    assert batch is not None
    assert (tmp_path / "skipped" / "damaged_step_0" / "batch.safetensors").read_bytes() == b"x"


def _put_when_gone(root):
    while (root / "step_0").exists():
        time.sleep(0.01)
    _put(root)


def test_damaged_batch_without_a_rewrite_ends_the_wait(tmp_path, monkeypatch, refusal):
    (_put(tmp_path) / "batch.safetensors").write_bytes(b"x")
    monkeypatch.setattr(batch_receiver, "_REWRITE_SECONDS", 0.05)
    with refusal(TransportError):
        _receiver(tmp_path, timeout=HANG).next_batch(0)


def test_repeatedly_damaged_batch_ends_the_wait(tmp_path, monkeypatch):
    def damaged(root, step, *, identity):
        raise TransportError("SHA-256 differs")

    monkeypatch.setattr(batch_receiver, "read_batch", damaged)
    with pytest.raises(TransportError, match="SHA-256"):
        _receiver(tmp_path, timeout=HANG).next_batch(0)


def test_batches_of_other_runs_are_not_read(tmp_path):
    _put(tmp_path)
    write_batch(tmp_path, _batch(step=3), identity=RunIdentity(run_id="run", attempt=2))
    write_batch(tmp_path, _batch(step=5), identity=RunIdentity(run_id="other", attempt=1))
    with pytest.raises(TransportError) as raised:
        _receiver(tmp_path).next_batch(3)
    assert raised.value.code == "BK-RUN-STALLED"


def test_other_ranks_receive_the_batch_from_rank_zero(tmp_path):
    ready, stop, failed = 1, 2, 3
    batch = _receiver(tmp_path, ranks=OtherRanks(ready)).next_batch(0)
    assert batch is not None
    assert len(batch.samples) == 1
    assert batch.samples[0].token_ids.tolist() == _batch(step=0).samples[0].token_ids.tolist()
    assert _receiver(tmp_path, ranks=OtherRanks(stop)).next_batch(0) is None
    with pytest.raises(TransportError) as raised:
        _receiver(tmp_path, ranks=OtherRanks(failed)).next_batch(0)
    assert raised.value.code == "BK-BATCH"
