"""Every sample in exactly one bin, no bin too full, ranks balanced."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buckeye.errors import TransportError
from buckeye.trainer.packing import distribute, pack


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(50, 120))
def test_pack(lengths, capacity):
    bins = pack(lengths, capacity)
    assert sorted(index for b in bins for index in b) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in b) for b in bins]
    assert all(0 < load <= capacity for load in loads)
    assert sum(load <= capacity / 2 for load in loads) <= 1  # two half-empty bins would have been one
    assert all(lengths[a] >= lengths[b] for bin_ in bins for a, b in pairwise(bin_))


def test_pack_by_hand():
    assert pack([3, 7, 5, 2, 4], 10) == [[1, 0], [2, 4], [3]]


def test_a_sample_longer_than_a_bin_is_an_error():
    with pytest.raises(TransportError, match=r"Sample 1 .* 11 tokens.*seq_len = 10"):
        pack([3, 11], 10)


@given(st.lists(st.integers(1, 100), max_size=40), st.integers(1, 5))
def test_distribute(costs, ranks):
    shares = distribute(costs, ranks)
    assert len(shares) == ranks
    assert sorted(i for share in shares for i in share) == list(range(len(costs)))
    loads = [sum(costs[i] for i in share) for share in shares]
    assert max(loads) - min(loads) <= max(costs, default=0)
