"""Rank 0 writes; all ranks go on, or meet a full disk, together."""

from __future__ import annotations

import threading

from buckeye.errors import DiskFullError
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


def _on_all(ranks, write):
    """What each of the ranks has raised."""
    raised = [None] * ranks.count

    def work(number):
        try:
            write_together(ranks.rank(number), lambda: write(number))
        except DiskFullError as error:
            raised[number] = str(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(ranks.count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def test_only_rank_0_writes():
    written = []
    assert _on_all(Threads(3), written.append) == [None] * 3
    assert written == [0]


def test_all_ranks_raise_together():
    def full(_):
        raise DiskFullError("The disk is full: it")

    assert _on_all(Threads(2), full) == ["The disk is full: it", "The disk of rank 0 is full; see its log."]
