"""All ranks leave a wait for disk space together."""

from __future__ import annotations

import threading

import pytest

from buckeye.base import disk
from buckeye.base.disk import Writing
from buckeye.errors import DiskFullError
from buckeye.trainer.parallel import ranks as one_rank_writes
from buckeye.trainer.parallel.ranks import write_together
from tests.waiting import HANG


class Threads:
    """Ranks as threads; `max` is a barrier, as a collective is."""

    def __init__(self, count):
        self.count = count
        self.votes = [0] * count
        self.barrier = threading.Barrier(count, timeout=HANG)

    def rank(self, number):
        return _Rank(self, number)


class _Rank:
    def __init__(self, threads, number):
        self.threads, self.number, self.first = threads, number, number == 0

    def max(self, value):
        self.threads.votes[self.number] = value
        self.threads.barrier.wait()
        largest = max(self.threads.votes)
        self.threads.barrier.wait()
        return largest


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(one_rank_writes, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(disk, "_TRY_AGAIN_SECONDS", 0.0)


def _on_all(ranks, writing_of):
    """What each of the ranks has raised."""
    raised = [None] * ranks.count

    def work(number):
        try:
            write_together(ranks.rank(number), writing_of(number))
        except DiskFullError as error:
            raised[number] = str(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(ranks.count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def test_only_the_first_writes_and_all_return_when_it_is_done(tmp_path):
    written = []

    def writing(number):
        def write():
            written.append(number)
            if len(written) < 3:
                raise OSError(28, "No space left on device")

        return Writing(tmp_path / "x", write, what="it", needed=0)

    assert _on_all(Threads(3), writing) == [None] * 3
    assert written == [0, 0, 0]


def test_all_are_stopped_together(tmp_path, monkeypatch):
    monkeypatch.setattr(one_rank_writes, "stop_requested", lambda: True)

    def full():
        raise OSError(28, "No space left on device")

    def writing(_):
        return Writing(tmp_path / "x", full, what="it", needed=0)

    assert [error[:12] for error in _on_all(Threads(2), writing)] == ["Asked to sto"] * 2
