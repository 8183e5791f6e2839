"""Waits have a deadline and a reason, and end on all ranks together."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from buckeye.errors import TransportError
from buckeye.process import RunIdentity, StopFlag
from buckeye.trainer import inbox
from buckeye.trainer.distributed import Ranks
from buckeye.trainer.inbox import Inbox
from buckeye.transport.batches import Batch, Sample, end_batches, write_batch

ME = RunIdentity(run_id="run", attempt=1)


class OtherRanks:
    """A rank that is not the first; `answer` is what the others say."""

    first = False

    def __init__(self, answer: int) -> None:
        self.answer = answer

    def max(self, value: int) -> int:
        return max(value, self.answer)


def _inbox(root, *, ranks=None, timeout=0.2) -> Inbox:
    ranks = ranks or Ranks(0, 1, torch.device("cpu"))
    return Inbox(root=root, identity=ME, ranks=ranks, stop=StopFlag(), timeout_seconds=timeout)


def _put(root):
    arrays = {"loss_mask": np.array([False, True]), "versions": np.zeros(2, np.int32)}
    arrays |= {name: np.zeros(2, np.float32) for name in ("logprobs", "advantages")}
    sample = Sample(token_ids=np.zeros(2, np.int32), temperature=1.0, **arrays)
    return write_batch(root, Batch(step=0, samples=(sample,), orchestrator_state={}), identity=ME)


def test_the_deadline_says_what_was_waited_for(tmp_path):
    with pytest.raises(TransportError, match=r"No batch 7 arrived in .* within 0\.2 s.*batch_timeout"):
        _inbox(tmp_path).next_batch(7)


def test_a_long_wait_is_reported(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(inbox, "_REPORT_SECONDS", 0.1)
    monkeypatch.setattr(inbox, "_AGREE_SECONDS", 0.05)
    monkeypatch.setattr(logging.getLogger("buckeye"), "propagate", True)
    with caplog.at_level("INFO"), pytest.raises(TransportError):
        _inbox(tmp_path, timeout=0.5).next_batch(3)
    first, second, *_ = dict.fromkeys(caplog.messages)  # pytest may hear a line twice
    assert first == "Waiting for training batch to arrive"
    assert second.startswith(f"Still waiting for batch 3 in {tmp_path}")


def test_a_stop_ends_the_wait(tmp_path):
    waiting = _inbox(tmp_path)
    waiting.stop.requested = True
    assert waiting.next_batch(0) is None


def test_the_end_of_all_batches_ends_the_wait(tmp_path):
    _put(tmp_path)
    end_batches(tmp_path, 1, identity=ME)
    waiting = _inbox(tmp_path, timeout=60.0)
    assert waiting.next_batch(0) is not None
    assert not waiting.ended(0)
    assert waiting.next_batch(1) is None
    assert waiting.ended(1)
    assert _inbox(tmp_path, ranks=OtherRanks(4)).next_batch(1) is None


def test_the_end_of_another_attempt_is_none(tmp_path):
    end_batches(tmp_path, 0, identity=RunIdentity(run_id="run", attempt=0))
    with pytest.raises(TransportError, match="No batch 0 arrived"):
        _inbox(tmp_path).next_batch(0)
    (tmp_path / "end.json").write_text("{")
    with pytest.raises(TransportError, match=r"end\.json cannot be read"):
        _inbox(tmp_path).next_batch(0)


def test_damage_ends_the_wait(tmp_path):
    (_put(tmp_path) / "batch.safetensors").write_bytes(b"x")
    with pytest.raises(TransportError, match="SHA-256"):
        _inbox(tmp_path).next_batch(0)


def test_other_ranks_follow_the_first(tmp_path):
    ready, stop, failed = 1, 2, 3
    _put(tmp_path)
    batch = _inbox(tmp_path, ranks=OtherRanks(ready)).next_batch(0)
    assert batch is not None
    assert len(batch.samples) == 1
    assert _inbox(tmp_path, ranks=OtherRanks(stop)).next_batch(0) is None
    with pytest.raises(TransportError, match="Another rank"):
        _inbox(tmp_path, ranks=OtherRanks(failed)).next_batch(0)
    with pytest.raises(TransportError, match="not by this one"):
        _inbox(tmp_path / "elsewhere", ranks=OtherRanks(ready)).next_batch(0)
