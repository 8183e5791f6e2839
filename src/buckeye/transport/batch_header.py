"""Header of a batch: all that a rank of the trainer needs of samples that other ranks compute.

The header has no tokens. It has facts about each sample, and the order of the token sequences. From the order
follow the common prefixes of any two samples, so all ranks plan a step alike before they read samples.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]


class SampleFacts(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Facts about a sample of `length` tokens.

    `has_advantage` is True if any trained token has a non-zero advantage. `is_finite` is True if the
    log-probs and the advantages of all trained tokens are finite. `trains_first` is True if the first token
    is trained. `token_range` has the lowest and the highest token id. `versions` has the number of trained
    tokens by policy version.
    """

    length: int
    trained_tokens: int
    has_advantage: bool
    is_finite: bool
    trains_first: bool
    token_range: tuple[int, int]
    versions: dict[int, int]


def sample_facts(
    *,
    token_ids: Tokens,
    loss_mask: npt.NDArray[np.bool_],
    logprobs: npt.NDArray[np.float32],
    versions: npt.NDArray[np.int32],
    advantages: npt.NDArray[np.float32],
) -> SampleFacts:
    """Return the facts about a sample with these arrays."""
    trained = advantages[loss_mask]
    return SampleFacts(
        length=len(token_ids),
        trained_tokens=len(trained),
        has_advantage=bool(trained.any()),
        is_finite=bool(np.isfinite(trained).all() and np.isfinite(logprobs[loss_mask]).all()),
        trains_first=bool(loss_mask[0]),
        token_range=(int(token_ids.min()), int(token_ids.max())),
        versions=_counts(versions[loss_mask]),
    )


def _counts(versions: npt.NDArray[np.int32]) -> dict[int, int]:
    if len(versions) and versions.min() == versions.max():  # usual, and without a sort
        return {int(versions[0]): len(versions)}
    values, counts = np.unique(versions, return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


class TokenOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Lexicographic order of the token sequences of a batch.

    `ranks` has the position of each sequence. Equal sequences have equal positions. `common` has, for each
    position, the number of first tokens that are equal to those of the sequence before.
    """

    ranks: list[int]
    common: list[int]


class BatchHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Header of a batch. Each list has an entry per sample. `sha256` are the checksums of the samples."""

    facts: list[SampleFacts]
    temperatures: list[float]
    groups: list[int]
    sha256: list[bytes]
    order: TokenOrder


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class UnreadTokens:
    """Token sequence of a batch with a known place in its order. `read` returns the tokens."""

    length: int
    rank: int
    order: TokenOrder
    read: Callable[[], Tokens]

    def __len__(self) -> int:
        return self.length


def order_tokens(sequences: Sequence[Tokens]) -> TokenOrder:
    """Return the order of all token sequences of a batch."""
    indices, common = sort_tokens(sequences)
    ranks, table = [0] * len(indices), [0]
    for (before, index), count in zip(pairwise(indices), common, strict=True):
        if count < max(len(sequences[before]), len(sequences[index])):
            table.append(count)
        ranks[index] = len(table) - 1
    return TokenOrder(ranks=ranks, common=table)


def sort_tokens(sequences: Sequence[Tokens | UnreadTokens]) -> tuple[list[int], list[int]]:
    """Return the indices of token sequences in lexicographic order, and the common prefixes of neighbors.

    Equal sequences are in the order of their indices. A common prefix is a number of tokens. Unread sequences
    must be of one batch. They are not read, except a few that are compared with sequences that have tokens.
    """

    def key(index: int) -> tuple[bytes, int]:
        return _tokens(sequences[index]).astype(">i4").tobytes(), index

    places = {i: s.rank for i, s in enumerate(sequences) if isinstance(s, UnreadTokens)}
    unread = sorted(places, key=lambda i: (places[i], i))
    indices, start = list[int](), 0
    for found in sorted(key(i) for i in range(len(sequences)) if i not in places):
        end = bisect.bisect_left(unread, found, lo=start, key=key)
        indices += [*unread[start:end], found[1]]
        start = end
    indices += unread[start:]
    return indices, [_common_prefix(sequences[a], sequences[b]) for a, b in pairwise(indices)]


def _common_prefix(first: Tokens | UnreadTokens, second: Tokens | UnreadTokens) -> int:
    """Return the number of equal first tokens of two sequences in lexicographic order."""
    length = min(len(first), len(second))
    if isinstance(first, UnreadTokens) and isinstance(second, UnreadTokens):
        return min(first.order.common[first.rank + 1 : second.rank + 1], default=length)
    different = np.flatnonzero(_tokens(first)[:length] != _tokens(second)[:length])
    return int(different[0]) if len(different) else length


def _tokens(sequence: Tokens | UnreadTokens) -> Tokens:
    return sequence.read() if isinstance(sequence, UnreadTokens) else sequence
