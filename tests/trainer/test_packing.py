"""Each sample is in exactly one bin, no bin is too full, shared prefixes count once, ranks are balanced."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buckeye.errors import TransportError
from buckeye.trainer.data.packing import distribute, pack, plan_bins, prefix_groups
from buckeye.transport.batch_header import UnreadTokens, order_tokens

# few token ids, so that samples also share prefixes by chance
batches = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=20), max_size=25)


def _arrays(samples):
    return [np.array(ids, dtype=np.int32) for ids in samples]


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(50, 120))
def test_pack(lengths, capacity):
    bins = pack(lengths, capacity)
    assert sorted(index for b in bins for index in b) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in b) for b in bins]
    assert all(0 < load <= capacity for load in loads)
    assert sum(load <= capacity / 2 for load in loads) <= 1  # two half-empty bins would have been merged
    place = {index: number for number, members in enumerate(bins) for index in members}
    room = [capacity] * len(bins)
    for index in sorted(place, key=lambda i: (-lengths[i], i)):
        assert place[index] == next(i for i, left in enumerate(room) if left >= lengths[index])
        room[place[index]] -= lengths[index]


def test_pack_by_hand():
    assert pack([3, 7, 5, 2, 4], 10) == [[1, 0], [2, 4], [3]]


def test_prefix_groups_by_hand():
    group, other = [[1, 2, 3, 4, n] for n in range(3)], [[1, 2, 9, 9, 9, n] for n in range(2)]
    found = prefix_groups(_arrays([*group, [7, 7], *other]))
    assert {(frozenset(f.members), f.prefix) for f in found} == {
        (frozenset({0, 1, 2}), 4),
        (frozenset({3}), 0),
        (frozenset({4, 5}), 5),
    }


def test_equal_samples_keep_separate_suffixes():
    (family,) = prefix_groups(_arrays([[5, 6, 7, 8, 9], [5, 6, 7, 8, 9], [5, 6, 7, 8, 9, 1]]))
    assert (family.members, family.prefix) == ((0, 1, 2), 4)


@given(batches)
def test_prefix_groups_have_equal_prefixes(samples):
    arrays = _arrays(samples)
    found = prefix_groups(arrays)
    assert sorted(m for f in found for m in f.members) == list(range(len(arrays)))
    for family in found:
        first = arrays[family.members[0]]
        assert (family.prefix > 0) == (len(family.members) > 1)
        for member in family.members:
            assert len(arrays[member]) > family.prefix
            assert np.array_equal(arrays[member][: family.prefix], first[: family.prefix])


@given(batches, st.data())
def test_prefix_groups_from_the_order_of_a_batch_equal_those_from_tokens(samples, data):
    """Some sequences are not of the batch. Samples of the batch that are left out change no group."""
    order = order_tokens(_arrays(samples))
    chosen = data.draw(
        st.lists(st.sampled_from(range(len(samples))), unique=True) if samples else st.just([])
    )
    others = data.draw(batches)
    read = _arrays([*(samples[i] for i in chosen), *others])
    unread = [
        UnreadTokens(length=len(tokens), rank=order.ranks[i], order=order, read=lambda tokens=tokens: tokens)
        for i, tokens in zip(chosen, read, strict=False)
    ]
    assert prefix_groups([*unread, *_arrays(others)]) == prefix_groups(read)


def test_a_batch_is_planned_without_its_tokens():
    group = _arrays([[1, 2, 3, 4, n, n] for n in range(4)])
    order = order_tokens(group)
    unread = [
        UnreadTokens(length=len(tokens), rank=rank, order=order, read=pytest.fail)
        for tokens, rank in zip(group, order.ranks, strict=True)
    ]
    assert plan_bins(unread, 11) == plan_bins(group, 11)


@given(batches, st.integers(20, 60))
def test_plan_bins(samples, capacity):
    arrays = _arrays(samples)
    bins = plan_bins(arrays, capacity)
    assert sorted(index for b in bins for index in b.indices) == list(range(len(arrays)))
    for b in bins:
        assert b.tokens <= capacity
        assert b.tokens <= sum(len(arrays[i]) for i in b.indices)
    assert sum(b.tokens <= capacity / 2 for b in bins) <= 1


def test_bins_by_hand():
    group = _arrays([[1, 2, 3, 4, n, n] for n in range(4)])  # a prefix of 4, suffixes of 2: 12 tokens
    (whole,) = plan_bins(group, 12, pair_cost=0.1)
    # 4 tokens attend to 16 / 2, and each suffix to (36 - 16) / 2
    assert (whole.indices, whole.tokens, whole.cost) == ((0, 1, 2, 3), 12, pytest.approx(12 + 0.1 * 48))
    split = plan_bins(group, 11)
    assert sorted(b.tokens for b in split) == [6, 10]  # three with the prefix, one alone
    assert [b.tokens for b in plan_bins(group, 8)] == [8, 8]  # two with the prefix, twice


def test_plan_bins_refuses_a_sample_longer_than_the_capacity():
    with pytest.raises(TransportError, match=r"sample 1 .* 11 tokens.*seq_len = 10"):
        plan_bins(_arrays([[1] * 3, [1] * 11]), 10)


@given(st.lists(st.integers(1, 100), max_size=40), st.integers(1, 5))
def test_distribute(costs, ranks):
    shares = distribute(costs, ranks)
    assert len(shares) == ranks
    assert sorted(i for share in shares for i in share) == list(range(len(costs)))
    loads = [sum(costs[i] for i in share) for share in shares]
    assert max(loads) - min(loads) <= max(costs, default=0)
