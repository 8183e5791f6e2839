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
from buckeye.transport.batches import Batch, BatchDamageError, Sample, write_batch
from tests.waiting import HANG

ME = RunIdentity(run_id="run", attempt=1)


class OtherRanks:
    """Ranks as seen by rank 1. `answers` are the values of the other ranks, in the order of the calls."""

    rank, world_size, is_rank_zero = 1, 2, False

    def __init__(self, root, *answers: int) -> None:
        self.root = root
        self.answers = list(answers)

    def max(self, value: int) -> int:
        return max(value, self.answers.pop(0))

    def broadcast(self, data: bytes | None) -> bytes:
        assert data is None
        return (self.root / "step_0" / "header.msgpack").read_bytes()


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
        share=lambda batch: batch.samples,
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
        raise BatchDamageError("SHA-256 differs")

    monkeypatch.setattr(batch_receiver, "read_header", damaged)
    with pytest.raises(TransportError, match="SHA-256"):
        _receiver(tmp_path, timeout=HANG).next_batch(0)


def test_batches_of_other_runs_are_not_read(tmp_path):
    _put(tmp_path)
    write_batch(tmp_path, _batch(step=3), identity=RunIdentity(run_id="run", attempt=2))
    write_batch(tmp_path, _batch(step=5), identity=RunIdentity(run_id="other", attempt=1))
    with pytest.raises(TransportError) as raised:
        _receiver(tmp_path).next_batch(3)
    assert raised.value.code == "BK-RUN-STALLED"


WAIT, READY, STOP, FAILED = range(4)


def test_other_ranks_follow_rank_zero(tmp_path):
    _put(tmp_path)
    batch = _receiver(tmp_path, ranks=OtherRanks(tmp_path, WAIT, READY, 0)).next_batch(0)
    assert batch is not None
    assert [sample.token_ids.tolist() for sample in batch.samples] == [[0, 0]]
    assert _receiver(tmp_path, ranks=OtherRanks(tmp_path, STOP)).next_batch(0) is None
    with pytest.raises(TransportError) as raised:
        _receiver(tmp_path, ranks=OtherRanks(tmp_path, FAILED)).next_batch(0)
    assert raised.value.code == "BK-BATCH"


def test_damage_that_another_rank_finds_makes_all_ranks_wait_again(tmp_path):
    _put(tmp_path)
    damaged, intact = 1, 0
    ranks = OtherRanks(tmp_path, READY, damaged, WAIT, READY, intact)
    assert _receiver(tmp_path, ranks=ranks).next_batch(0) is not None
    assert ranks.answers == []


def test_damage_that_only_another_rank_finds_ends_the_wait_the_third_time(tmp_path, refusal):
    _put(tmp_path)
    ranks = OtherRanks(tmp_path, *[READY, 1] * 3, FAILED)
    with refusal(TransportError) as raised:
        _receiver(tmp_path, ranks=ranks).next_batch(0)
    assert raised.value.code == "BK-BATCH"
    assert ranks.answers == []
