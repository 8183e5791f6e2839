"""Rank 0 writes; all ranks continue together, or report a full disk together."""

import pytest

from buckeye.errors import DiskFullError
from buckeye.trainer.parallel.ranks import write_together


class Rank:
    """One of several ranks; `vote` is the largest value of the others."""

    def __init__(self, *, first: bool, vote: int = 0) -> None:
        self.first, self.vote, self.values = first, vote, []

    def max(self, value: int) -> int:
        self.values.append(value)
        return max(value, self.vote)


def full() -> None:
    raise DiskFullError("full")


def test_only_rank_0_writes():
    written = []
    for rank in (Rank(first=True), Rank(first=False), Rank(first=False)):
        write_together(rank, lambda: written.append(0))
        assert rank.values == [0]
    assert written == [0]


def test_all_ranks_raise_together(refusal):
    first = Rank(first=True)
    with pytest.raises(DiskFullError, match="full"):
        write_together(first, full)
    (vote,) = first.values
    with refusal(DiskFullError):
        write_together(Rank(first=False, vote=vote), full)
