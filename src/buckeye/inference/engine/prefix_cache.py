"""Prompts in the cache: those of running sequences, and kept prefixes of ended ones."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from buckeye.inference.engine.sequences import Sequence


class RunningPrompts:
    """Running sequences by prompt. A sequence with an equal prompt can copy their keys and values."""

    def __init__(self) -> None:
        self._sequences: dict[tuple[int, ...], dict[Sequence, None]] = {}

    def find_same_prompt(self, prompt: tuple[int, ...]) -> Sequence | None:
        """Return the first sequence with this prompt, or None."""
        return next(iter(self._sequences.get(prompt, ())), None)

    def add(self, sequence: Sequence) -> None:
        """Register that the slot of `sequence` holds its prompt."""
        self._sequences.setdefault(sequence.prompt_ids, {})[sequence] = None

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, if present."""
        siblings = self._sequences.get(sequence.prompt_ids)
        if siblings is not None:
            siblings.pop(sequence, None)
            if not siblings:
                del self._sequences[sequence.prompt_ids]

    def clear(self) -> None:
        """Remove all sequences."""
        self._sequences.clear()


class CachedPrefix(NamedTuple):
    """Keys and values of the first `length` positions, in cache slot `slot`."""

    slot: int
    length: int


class PrefixCache:
    """Ended sequences with keys and values in spare cache slots.

    A prompt that continues an ended sequence, such as the next turn of a conversation, reuses its keys and
    values. The oldest sequence is replaced first.

    A prompt matches only if it begins with the whole kept sequence. So the result of a prompt does not depend
    on other conversations.
    """

    def __init__(self, slots: range) -> None:
        self._free = list(slots)
        self._tokens: OrderedDict[int, tuple[int, ...]] = OrderedDict()

    def keep(self, tokens: tuple[int, ...]) -> int | None:
        """Return the slot to copy the keys and values of `tokens` to, or None without spare slots."""
        if self._free:
            slot = self._free.pop()
        elif self._tokens:
            slot, _ = self._tokens.popitem(last=False)
        else:
            return None
        self._tokens[slot] = tokens
        return slot

    def take(self, prompt: tuple[int, ...]) -> CachedPrefix | None:
        """Return the longest kept sequence that `prompt` continues.

        Its slot is released, so the next `keep` may overwrite it.
        """
        best: int | None = None
        for slot, tokens in self._tokens.items():
            longer = best is None or len(tokens) > len(self._tokens[best])
            if longer and len(tokens) < len(prompt) and prompt[: len(tokens)] == tokens:
                best = slot
        if best is None:
            return None
        self._free.append(best)
        return CachedPrefix(best, len(self._tokens.pop(best)))

    def clear(self) -> None:
        """Release all kept sequences."""
        self._free.extend(self._tokens)
        self._tokens.clear()
