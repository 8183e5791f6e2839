"""Rank 0 writes; all ranks continue together, or report a full disk together."""

import pytest

from buckeye.errors import DiskFullError
from buckeye.trainer.parallel.ranks import write_on_rank_zero


class Rank:
    """One of several ranks; `vote` is the largest value of the others."""

    def __init__(self, *, is_rank_zero: bool, vote: int = 0) -> None:
        self.is_rank_zero, self.vote, self.values = is_rank_zero, vote, []

    def max(self, value: int) -> int:
        self.values.append(value)
        return max(value, self.vote)


def full() -> None:
    raise DiskFullError("full")


def test_only_rank_0_writes():
    written = []
    for rank in (Rank(is_rank_zero=True), Rank(is_rank_zero=False), Rank(is_rank_zero=False)):
        write_on_rank_zero(rank, lambda: written.append(0))
        assert rank.values == [0]
    assert written == [0]


def test_all_ranks_raise_together(refusal):
    is_rank_zero = Rank(is_rank_zero=True)
    with pytest.raises(DiskFullError, match="full"):
        write_on_rank_zero(is_rank_zero, full)
    (vote,) = is_rank_zero.values
    with refusal(DiskFullError):
        write_on_rank_zero(Rank(is_rank_zero=False, vote=vote), full)
