"""Where the tokens of a row lie, and which of them see each other.

Samples that begin alike, such as the rollouts of a group, share a *prefix*: its tokens are in the row once.
The rest of each sample is its *suffix*: a token of it sees the prefix and the suffix up to itself. A sample
that shares nothing is a suffix without a prefix.

For attention, *segments* (prefixes and suffixes) of similar length form *blocks* that are padded to
[segments, length]: no work is spent on the squares between samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Tokens = npt.NDArray[np.int32]

_SHORTEST = 0.75  # of the longest in a block: at most 1 / 0.75^2 = 1.8 times the useful work,
_SLACK = 16  # or so many tokens shorter: a call costs more than a little padding
_SHORTEST_PREFIX = 4  # tokens: sharing fewer does not pay for the longer keys
SHORT_KEYS = 256  # for so many keys scores are few, and masks of them are affordable


@dataclass(frozen=True, slots=True)
class Family:
    """Samples, by their number, whose first `prefix` tokens are the same and in the row once."""

    members: tuple[int, ...]
    prefix: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Neighbouring segments of similar length: tokens `start` to `end` of the row as [segments, length].

    `gather` i64[segments * length] names for each padded place a token of the slice (padding repeats the last
    one, which no real token sees); `scatter` i64[end - start] is the way back. Both are None if all segments
    are equally long. Suffixes also see prefixes: `prefix_block` is the number of the block with these,
    `families` i64[segments] says which of its segments, and `prefix_lengths` i64[segments] how long it is. If
    they see more than `SHORT_KEYS` keys, all of them are `common_prefix` long.
    """

    start: int
    end: int
    segments: int
    length: int
    gather: Tensor | None
    scatter: Tensor | None
    prefix_block: int | None = None
    families: Tensor | None = None
    prefix_lengths: Tensor | None = None
    common_prefix: int | None = None
    masks: dict[tuple[int, int | None, torch.dtype], Tensor] = field(default_factory=dict)

    def mask(self, keys: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
        """What is added to the scores: 0 where a token sees a key, else -inf. [1 or segments, length, keys]
        for `keys` places of which the last `length` are the segments', and the others the prefixes'."""
        key = (keys, window, dtype)
        if key not in self.masks:
            self.masks[key] = _mask(self, keys, window, dtype, device)
        return self.masks[key]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The blocks of a row, and the same for kernels that take segments of any length: `query_ends`
    i32[segments + 1] and `key_ends` i32[segments + 1] are where the tokens of each end, and where its keys do
    among `keys` i64[all segments' keys], which are places in the row (None: the row itself)."""

    blocks: tuple[Block, ...]
    query_ends: Tensor
    key_ends: Tensor
    longest_query: int
    longest_keys: int
    keys: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A row: the samples' tokens in its order, their positions within their samples, the layout, and for each
    sample the places of its tokens in the row."""

    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    places: tuple[npt.NDArray[np.int64], ...]
    layout: Layout


@dataclass(frozen=True, slots=True)
class _Segment:
    """Tokens `begin` and later of a sample, or the first `length` of it; `family` numbers its prefix."""

    sample: int
    begin: int
    length: int
    family: int | None = None


def families(token_ids: Sequence[Tokens]) -> list[Family]:
    """Which samples share a prefix, so that few tokens remain. Every sample is in exactly one family, and has
    a suffix of at least one token.

    Samples are sorted by their tokens, so that those that begin alike are neighbours; then families grow
    together, longest common prefix first, as long as that saves tokens.
    """
    order = sorted(range(len(token_ids)), key=lambda i: (token_ids[i].astype(">i4").tobytes(), i))
    common = [_common_prefix(token_ids[a], token_ids[b]) for a, b in pairwise(order)]
    begins, ends = list(range(len(order))), list(range(1, len(order) + 1))  # of the interval a place is in
    prefixes = [len(token_ids[i]) for i in order]  # of the interval that begins here
    for place in sorted(range(len(common)), key=lambda i: (-common[i], i)):
        left, middle, right = begins[place], place + 1, ends[place + 1]
        apart = (middle - left - 1) * prefixes[left] + (right - middle - 1) * prefixes[middle]
        if common[place] >= _SHORTEST_PREFIX and (right - left - 1) * common[place] >= apart:
            prefixes[left] = common[place]
            begins[right - 1], ends[left] = left, right
    found = []
    start = 0
    while start < len(order):
        members = tuple(order[start : ends[start]])
        shared = len(members) > 1 and prefixes[start] >= _SHORTEST_PREFIX
        found += [Family(members, prefixes[start])] if shared else [Family((i,), 0) for i in members]
        start = ends[start]
    return found


def _common_prefix(one: Tokens, other: Tokens) -> int:
    length = min(len(one), len(other)) - 1
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length


def plan_row(token_ids: Sequence[Tokens], device: torch.device, *, share: bool = True) -> Plan:
    """Lay samples out in a row, shared prefixes once."""
    found = families(token_ids) if share else [Family((i,), 0) for i in range(len(token_ids))]
    groups = _group_segments(found, token_ids)
    segments = [segment for group in groups for segment in group]
    starts = [0, *accumulate(s.length for s in segments)]
    places = _places(found, segments, starts, token_ids)
    tokens = np.concatenate([token_ids[s.sample][s.begin : s.begin + s.length] for s in segments])
    positions = np.concatenate([np.arange(s.begin, s.begin + s.length) for s in segments])
    return Plan(
        token_ids=tokens.astype(np.int64),
        positions=positions,
        places=places,
        layout=_layout(found, groups, segments, starts, device),
    )


def _group_segments(found: Sequence[Family], token_ids: Sequence[Tokens]) -> list[list[_Segment]]:
    """Segments in the order of the row, grouped into blocks: those without a prefix, longest first; then
    prefixes, longest first, each block of them followed by the blocks of their suffixes."""
    alone = [_Segment(m, 0, len(token_ids[m])) for f in found if not f.prefix for m in f.members]
    groups = _similar(alone)
    prefixes = [_Segment(f.members[0], 0, f.prefix, number) for number, f in enumerate(found) if f.prefix]
    for block in _similar(prefixes):
        suffixes = [
            _Segment(m, p.length, len(token_ids[m]) - p.length, p.family)
            for p in block
            for m in found[p.family if p.family is not None else -1].members
        ]
        groups += [block, *_similar(suffixes, padded_prefix=block[0].length)]
    return groups


def _similar(segments: Sequence[_Segment], *, padded_prefix: int = 0) -> list[list[_Segment]]:
    """Groups of segments of similar length. Suffixes of different prefixes are together only where attention
    masks the padding of these, which are `padded_prefix` long with it: where there are few keys."""
    groups: list[list[_Segment]] = []
    for segment in sorted(segments, key=lambda s: (-s.length, -s.begin)):
        longest = groups[-1][0].length if groups else 0
        similar = segment.length >= _SHORTEST * longest or longest - segment.length <= _SLACK
        alike = groups and (
            all(s.begin == segment.begin for s in groups[-1]) or padded_prefix + longest <= SHORT_KEYS
        )
        if similar and alike:
            groups[-1].append(segment)
        else:
            groups.append([segment])
    return groups


def _places(
    found: Sequence[Family], segments: Sequence[_Segment], starts: Sequence[int], token_ids: Sequence[Tokens]
) -> tuple[npt.NDArray[np.int64], ...]:
    prefix_starts = {s.family: start for s, start in zip(segments, starts, strict=False) if _is_prefix(s)}
    places: list[npt.NDArray[np.int64]] = [np.zeros(0, np.int64)] * len(token_ids)
    for segment, start in zip(segments, starts, strict=False):
        if not _is_prefix(segment):
            own = np.arange(start, start + segment.length)
            if segment.family is not None:
                first = prefix_starts[segment.family]
                own = np.concatenate([np.arange(first, first + found[segment.family].prefix), own])
            places[segment.sample] = own
    return tuple(places)


def _is_prefix(segment: _Segment) -> bool:
    return segment.family is not None and segment.begin == 0


def _layout(
    found: Sequence[Family],
    groups: Sequence[Sequence[_Segment]],
    segments: Sequence[_Segment],
    starts: Sequence[int],
    device: torch.device,
) -> Layout:
    slots = {  # family -> (number of the block with its prefix, number within the block)
        s.family: (number, slot)
        for number, group in enumerate(groups)
        for slot, s in enumerate(group)
        if _is_prefix(s)
    }
    prefix_starts = {s.family: a for s, a in zip(segments, starts, strict=False) if _is_prefix(s)}
    blocks, keys, start = [], [], 0
    for group in groups:
        blocks.append(_block(group, start, slots, device))
        start = blocks[-1].end
    for segment, begin in zip(segments, starts, strict=False):
        if segment.begin:
            first = prefix_starts[segment.family]
            keys.append(np.arange(first, first + segment.begin))
        keys.append(np.arange(begin, begin + segment.length))
    key_counts = [s.begin + s.length for s in segments]
    shared = any(f.prefix for f in found)
    return Layout(
        blocks=tuple(blocks),
        query_ends=torch.tensor(starts, dtype=torch.int32, device=device),
        key_ends=torch.tensor([0, *accumulate(key_counts)], dtype=torch.int32, device=device),
        longest_query=max(s.length for s in segments),
        longest_keys=max(key_counts),
        keys=torch.from_numpy(np.concatenate(keys)).to(device) if shared else None,
    )


def _block(
    group: Sequence[_Segment], start: int, slots: dict[int | None, tuple[int, int]], device: torch.device
) -> Block:
    lengths = [s.length for s in group]
    total, longest = sum(lengths), max(lengths)
    gather = scatter = None
    if longest * len(lengths) != total:
        begins = torch.tensor([0, *accumulate(lengths)])[:-1, None]
        real = torch.arange(longest)[None] < torch.tensor(lengths)[:, None]
        gather = (begins + torch.arange(longest)[None]).clamp_max(total - 1).flatten().to(device)
        scatter = real.flatten().nonzero().squeeze(1).to(device)
    suffixes = group[0].begin > 0
    same = all(s.begin == group[0].begin for s in group)
    return Block(
        start=start,
        end=start + total,
        segments=len(lengths),
        length=longest,
        gather=gather,
        scatter=scatter,
        prefix_block=slots[group[0].family][0] if suffixes else None,
        families=torch.tensor([slots[s.family][1] for s in group], device=device) if suffixes else None,
        prefix_lengths=torch.tensor([s.begin for s in group], device=device) if suffixes else None,
        common_prefix=group[0].begin if suffixes and same else None,
    )


def _mask(block: Block, keys: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    own = torch.arange(block.length, device=device)
    padded = keys - block.length
    prefix = torch.zeros(1, dtype=torch.int64, device=device)
    if block.prefix_lengths is not None:
        prefix = block.prefix_lengths
        if block.common_prefix is not None:
            prefix = prefix[:1]
    position = torch.arange(padded, device=device).expand(len(prefix), padded)
    absent = position >= prefix[:, None]
    position = torch.cat([position, prefix[:, None] + own], dim=1)
    distance = (prefix[:, None] + own)[:, :, None] - position[:, None]
    hidden = distance < 0
    hidden[:, :, :padded] |= absent[:, None]
    if window is not None:
        hidden |= distance >= window
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
