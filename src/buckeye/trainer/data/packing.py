"""Sample packing: samples are packed into bins of limited size, and each bin becomes one row of tokens.

The bins are distributed to the ranks so that all ranks have about equal work.

Samples with a common beginning, such as the rollouts of a group, share a *prefix*, whose tokens are in the
row only once. The rest of each sample is its *suffix*. A token of a suffix attends to the prefix, and to the
suffix up to itself. A sample that shares no prefix is a suffix without a prefix.

Prefixes and suffixes are *segments*. For attention, segments of similar length form a *block*, padded to
[segments, length]. Attention computes no pairs of tokens from different samples.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from buckeye.errors import TransportError
from buckeye.trainer.model.attention import SHORT_KEYS, Block, Layout
from buckeye.transport.batch_header import Tokens, UnreadTokens, sort_tokens

# A segment joins a block if it has this share of the longest segment's length. So padding makes attention at
# most 1 / 0.75^2 = 1.8 times as expensive.
_MIN_LENGTH_SHARE = 0.75
# A segment that is at most this many tokens shorter also joins, because one more kernel call costs more than
# the padding.
_SLACK = 16
# Sharing a shorter prefix costs more than it saves, because it makes keys longer.
_MIN_PREFIX = 4


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Indices of samples that share their first `prefix` tokens."""

    members: tuple[int, ...]
    prefix: int


@dataclass(frozen=True, slots=True)
class Bin:
    """Samples that are computed in one row.

    `indices` are the indices of the samples. `tokens` counts the tokens of a shared prefix once. `cost` is
    the estimated work, in units of a token without attention.
    """

    indices: tuple[int, ...]
    tokens: int
    cost: float


def plan_bins(
    token_ids: Sequence[Tokens | UnreadTokens], capacity: int, *, pair_cost: float = 0.0, padded: bool = False
) -> list[Bin]:
    """Return the samples in bins of at most `capacity` tokens, by first-fit decreasing.

    Each sample is in exactly one bin. Samples that share a prefix stay in one bin if they fit. Otherwise they
    are split, and each of their bins contains the prefix. First-fit decreasing needs at most 11/9 of the
    optimal number of bins plus 6/9 (Dósa 2007).

    `pair_cost` is the cost of attention per pair of tokens, in units of the cost of a token without
    attention. If `padded`, each sample has its own row, padded to the longest sample of the bin, and prefixes
    are not shared. Raise `TransportError` for a sample longer than `capacity`, which the orchestrator should
    have truncated.
    """
    lengths = [len(ids) for ids in token_ids]
    for index, length in enumerate(lengths):
        if length > capacity:
            raise TransportError(
                f"sample {index} of the batch has {length} tokens, more than trainer.seq_len = {capacity}",
                code="BK-BATCH",
                hint="raise trainer.seq_len, or lower orchestrator.seq_len",
            )
    if padded:
        return _plan_padded_bins(lengths, capacity, pair_cost)
    parts = [part for group in prefix_groups(token_ids) for part in _split(group, lengths, capacity)]
    tokens = [_tokens(part, lengths) for part in parts]
    return [
        Bin(
            indices=tuple(index for number in numbers for index in parts[number].members),
            tokens=sum(tokens[number] for number in numbers),
            cost=sum(_cost(parts[number], lengths, pair_cost) for number in numbers),
        )
        for numbers in pack(tokens, capacity)
    ]


def _plan_padded_bins(lengths: Sequence[int], capacity: int, pair_cost: float) -> list[Bin]:
    """Return bins of samples of similar length. Their padded rows have at most `capacity` tokens."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    bins = []
    while order:
        longest = lengths[order[0]]
        members, order = order[: capacity // longest], order[capacity // longest :]
        tokens = longest * len(members)
        bins.append(Bin(indices=tuple(members), tokens=tokens, cost=tokens * (1 + pair_cost * longest / 2)))
    return bins


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return the indices of `lengths` in bins with a sum of at most `capacity`, by first-fit decreasing.

    No length may exceed `capacity`. A tree over the bins finds the first one with room in O(log n).
    """
    leaves = 1 << max(0, len(lengths) - 1).bit_length()
    room = [capacity] * (2 * leaves)  # node i has the larger room of its children 2i and 2i + 1
    bins: list[list[int]] = [[] for _ in lengths]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        node = 1
        while node < leaves:
            node = 2 * node if room[2 * node] >= lengths[index] else 2 * node + 1
        bins[node - leaves].append(index)
        room[node] -= lengths[index]
        while node := node // 2:
            room[node] = max(room[2 * node], room[2 * node + 1])
    return [members for members in bins if members]


def distribute(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Return the indices of the bins of each rank, so that all ranks have about equal work.

    The bins are assigned in order of descending cost, each to the rank that has the least work. The busiest
    rank gets at most 4/3 of the optimum (Graham 1969). A rank may get no bin.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    load = [(0.0, rank) for rank in range(ranks)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        total, rank = heapq.heappop(load)
        shares[rank].append(index)
        heapq.heappush(load, (total + costs[index], rank))
    return shares


def prefix_groups(token_ids: Sequence[Tokens | UnreadTokens]) -> list[PrefixGroup]:
    """Return groups of samples that share a prefix, so that few tokens have to be computed.

    Every sample is in exactly one group, and has a suffix of at least one token.

    The function sorts the samples by their tokens, so that samples with a common beginning are neighbors.
    Then it merges neighboring groups if this saves tokens. It starts with the groups that have the longest
    common prefix.
    """
    order, equal = sort_tokens(token_ids)
    shorter = [min(len(token_ids[a]), len(token_ids[b])) for a, b in pairwise(order)]
    common = [min(count, length - 1) for count, length in zip(equal, shorter, strict=True)]
    # By index: the start and the end of the interval of samples that contains the index.
    begins, ends = list(range(len(order))), list(range(1, len(order) + 1))
    prefixes = [len(token_ids[i]) for i in order]  # by start of an interval: the length of its prefix
    for index in sorted(range(len(common)), key=lambda i: (-common[i], i)):
        left, middle, right = begins[index], index + 1, ends[index + 1]
        saved_apart = (middle - left - 1) * prefixes[left] + (right - middle - 1) * prefixes[middle]
        if common[index] >= _MIN_PREFIX and (right - left - 1) * common[index] >= saved_apart:
            prefixes[left] = common[index]
            begins[right - 1], ends[left] = left, right
    groups = []
    start = 0
    while start < len(order):
        members = tuple(order[start : ends[start]])
        is_shared = len(members) > 1 and prefixes[start] >= _MIN_PREFIX
        groups += (
            [PrefixGroup(members, prefixes[start])] if is_shared else [PrefixGroup((i,), 0) for i in members]
        )
        start = ends[start]
    return groups


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedMicroBatch:
    """Row of packed samples for one forward pass. A shared prefix is in the row once.

    `token_ids` and `position_ids` are i64[tokens]. `layout` defines for attention which tokens attend to each
    other. `row_indices` i64 has the index in the row for each token of each sample, sample after sample.

    Three tensors have an entry for each of the N trained tokens, sample after sample. `sources` i64[N] is the
    row index of the hidden state that predicts the token. `targets` i64[N] is the id of the token.
    `sequences` i64[N] is the index of its sample.
    """

    token_ids: Tensor
    position_ids: Tensor
    layout: Layout
    row_indices: Tensor
    sources: Tensor
    targets: Tensor
    sequences: Tensor


def pack_micro_batch(
    token_ids: Sequence[Tokens],
    loss_masks: Sequence[npt.NDArray[np.bool_]],
    device: torch.device,
    *,
    share_prefixes: bool = True,
) -> PackedMicroBatch:
    """Pack samples into a row. Without `share_prefixes`, the row has all tokens of every sample.

    Raise `TransportError` if the first token of a sample is trained, because no token predicts the first one.
    """
    if any(mask[0] for mask in loss_masks):
        raise TransportError(
            "the loss mask of a sample includes its first token, which no token predicts", code="BK-BATCH"
        )
    groups = (
        prefix_groups(token_ids) if share_prefixes else [PrefixGroup((i,), 0) for i in range(len(token_ids))]
    )
    blocks = _segments_in_blocks(groups, token_ids)
    segments = [segment for block in blocks for segment in block]
    starts = [0, *accumulate(s.length for s in segments)]
    row = np.concatenate([token_ids[s.sample][s.begin : s.begin + s.length] for s in segments])
    row = row.astype(np.int64)
    trained = np.flatnonzero(np.concatenate(loss_masks))
    row_indices = np.concatenate(_row_indices(groups, segments, starts, token_ids))
    sequences = np.repeat(np.arange(len(token_ids)), [len(ids) for ids in token_ids])
    tensors = {
        "token_ids": row,
        "position_ids": np.concatenate([np.arange(s.begin, s.begin + s.length) for s in segments]),
        "row_indices": row_indices,
        "sources": row_indices[trained - 1],
        "targets": row[row_indices[trained]],
        "sequences": sequences[trained],
    }
    return PackedMicroBatch(
        layout=_layout(groups, blocks, segments, starts, device),
        **{name: torch.from_numpy(t).to(device) for name, t in tensors.items()},
    )


def _split(group: PrefixGroup, lengths: Sequence[int], capacity: int) -> list[PrefixGroup]:
    """Split a group into groups of at most `capacity` tokens. A group of one sample has no prefix."""
    suffixes = [lengths[m] - group.prefix for m in group.members]
    if group.prefix + sum(suffixes) <= capacity:
        return [group]
    packed = pack(suffixes, capacity - group.prefix)
    return [
        PrefixGroup(tuple(group.members[i] for i in numbers), group.prefix if len(numbers) > 1 else 0)
        for numbers in packed
    ]


def _tokens(group: PrefixGroup, lengths: Sequence[int]) -> int:
    return group.prefix + sum(lengths[m] - group.prefix for m in group.members)


def _cost(group: PrefixGroup, lengths: Sequence[int], pair_cost: float) -> float:
    """Return the number of tokens plus `pair_cost` times the number of pairs for attention.

    n tokens have n^2 / 2 pairs. The tokens of a suffix also form pairs with those of the prefix.
    """
    pairs = (group.prefix**2 + sum(lengths[m] ** 2 - group.prefix**2 for m in group.members)) / 2
    return _tokens(group, lengths) + pair_cost * pairs


@dataclass(frozen=True, slots=True)
class _Segment:
    """Prefix or suffix: `length` tokens of a sample from `begin` on. A shared one has a `prefix_group`."""

    sample: int
    begin: int
    length: int
    prefix_group: int | None = None


def _segments_in_blocks(groups: Sequence[PrefixGroup], token_ids: Sequence[Tokens]) -> list[list[_Segment]]:
    """Return the segments in the order of the row, grouped into blocks.

    First are the blocks of segments that share no prefix. Then each block of prefixes is followed by the
    blocks of its suffixes. Longer segments are before shorter ones.
    """
    unshared = [_Segment(m, 0, len(token_ids[m])) for g in groups if not g.prefix for m in g.members]
    blocks = _group_by_length(unshared)
    prefixes = [_Segment(g.members[0], 0, g.prefix, number) for number, g in enumerate(groups) if g.prefix]
    for block in _group_by_length(prefixes):
        suffixes = [
            _Segment(m, p.length, len(token_ids[m]) - p.length, p.prefix_group)
            for p in block
            for m in groups[p.prefix_group if p.prefix_group is not None else -1].members
        ]
        blocks += [block, *_group_by_length(suffixes, padded_prefix=block[0].length)]
    return blocks


def _group_by_length(segments: Sequence[_Segment], *, padded_prefix: int = 0) -> list[list[_Segment]]:
    """Return groups of segments of similar length.

    `padded_prefix` is the padded length of the prefixes of suffixes. Suffixes with prefixes of different
    lengths share a group only up to `SHORT_KEYS` keys. With more keys, attention does not mask the padding of
    the prefixes.
    """
    groups: list[list[_Segment]] = []
    for segment in sorted(segments, key=lambda s: (-s.length, -s.begin)):
        longest = groups[-1][0].length if groups else 0
        is_similar = segment.length >= _MIN_LENGTH_SHARE * longest or longest - segment.length <= _SLACK
        can_share = groups and (
            all(s.begin == segment.begin for s in groups[-1]) or padded_prefix + longest <= SHORT_KEYS
        )
        if is_similar and can_share:
            groups[-1].append(segment)
        else:
            groups.append([segment])
    return groups


def _row_indices(
    groups: Sequence[PrefixGroup],
    segments: Sequence[_Segment],
    starts: Sequence[int],
    token_ids: Sequence[Tokens],
) -> tuple[npt.NDArray[np.int64], ...]:
    prefix_starts = {
        s.prefix_group: start for s, start in zip(segments, starts, strict=False) if _is_prefix(s)
    }
    row_indices: list[npt.NDArray[np.int64]] = [np.zeros(0, np.int64)] * len(token_ids)
    for segment, start in zip(segments, starts, strict=False):
        if not _is_prefix(segment):
            own = np.arange(start, start + segment.length)
            if segment.prefix_group is not None:
                first = prefix_starts[segment.prefix_group]
                own = np.concatenate([np.arange(first, first + groups[segment.prefix_group].prefix), own])
            row_indices[segment.sample] = own
    return tuple(row_indices)


def _is_prefix(segment: _Segment) -> bool:
    return segment.prefix_group is not None and segment.begin == 0


def _layout(
    groups: Sequence[PrefixGroup],
    block_segments: Sequence[Sequence[_Segment]],
    segments: Sequence[_Segment],
    starts: Sequence[int],
    device: torch.device,
) -> Layout:
    slots = {  # by group: the index of the block that contains its prefix, and the index in this block
        s.prefix_group: (number, slot)
        for number, block in enumerate(block_segments)
        for slot, s in enumerate(block)
        if _is_prefix(s)
    }
    prefix_starts = {s.prefix_group: a for s, a in zip(segments, starts, strict=False) if _is_prefix(s)}
    blocks, keys, start = [], [], 0
    for block in block_segments:
        blocks.append(_make_block(block, start, slots, device))
        start = blocks[-1].end
    for segment, begin in zip(segments, starts, strict=False):
        if segment.begin:
            first = prefix_starts[segment.prefix_group]
            keys.append(np.arange(first, first + segment.begin))
        keys.append(np.arange(begin, begin + segment.length))
    key_counts = [s.begin + s.length for s in segments]
    is_shared = any(group.prefix for group in groups)
    return Layout(
        blocks=tuple(blocks),
        query_ends=torch.tensor(starts, dtype=torch.int32, device=device),
        key_ends=torch.tensor([0, *accumulate(key_counts)], dtype=torch.int32, device=device),
        longest_query=max(s.length for s in segments),
        longest_keys=max(key_counts),
        keys=torch.from_numpy(np.concatenate(keys)).to(device) if is_shared else None,
    )


def _make_block(
    block: Sequence[_Segment], start: int, slots: dict[int | None, tuple[int, int]], device: torch.device
) -> Block:
    lengths = [s.length for s in block]
    total, longest = sum(lengths), max(lengths)
    gather = scatter = None
    if longest * len(lengths) != total:
        begins = torch.tensor([0, *accumulate(lengths)])[:-1, None]
        real = torch.arange(longest)[None] < torch.tensor(lengths)[:, None]
        gather = (begins + torch.arange(longest)[None]).clamp_max(total - 1).flatten().to(device)
        scatter = real.flatten().nonzero().squeeze(1).to(device)
    has_prefixes = block[0].begin > 0
    has_common_prefix = has_prefixes and all(s.begin == block[0].begin for s in block)
    return Block(
        start=start,
        end=start + total,
        segments=len(lengths),
        length=longest,
        gather=gather,
        scatter=scatter,
        prefix_block=slots[block[0].prefix_group][0] if has_prefixes else None,
        prefix_rows=torch.tensor([slots[s.prefix_group][1] for s in block], device=device)
        if has_prefixes
        else None,
        prefix_lengths=torch.tensor([s.begin for s in block], device=device) if has_prefixes else None,
        common_prefix=block[0].begin if has_common_prefix else None,
    )
