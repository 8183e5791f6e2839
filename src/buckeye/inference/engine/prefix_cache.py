"""Index of the KV cache: the prompts of running sequences, and the kept tokens of ended sequences."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from buckeye.inference.engine.sequences import Sequence


class RunningPrompts:
    """Running sequences by prompt. A new sequence copies the keys and values of an equal prompt."""

    def __init__(self) -> None:
        self._sequences: dict[tuple[int, ...], dict[Sequence, None]] = {}

    def find_same_prompt(self, prompt: tuple[int, ...]) -> Sequence | None:
        """Return the running sequence that was added first with this prompt, or None."""
        return next(iter(self._sequences.get(prompt, ())), None)

    def add(self, sequence: Sequence) -> None:
        """Add a sequence. Its slot holds the keys and values of its prompt."""
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
    """Ended sequences whose keys and values are kept in spare cache slots.

    A prompt that begins with all tokens of an ended sequence, such as the next turn of a conversation, reuses
    the keys and values of that sequence. If all slots are used, the oldest sequence is replaced.

    A prompt never reuses only the first part of a sequence. Reused values can differ from computed values by
    rounding, so a reply would depend on other conversations that start with the same tokens.
    """

    def __init__(self, slots: range) -> None:
        self._free = list(slots)
        self._tokens: OrderedDict[int, tuple[int, ...]] = OrderedDict()

    def keep(self, tokens: tuple[int, ...]) -> int | None:
        """Add an ended sequence. Return the slot to copy its keys and values to, or None without slots."""
        if self._free:
            slot = self._free.pop()
        elif self._tokens:
            slot, _ = self._tokens.popitem(last=False)
        else:
            return None
        self._tokens[slot] = tokens
        return slot

    def take(self, prompt: tuple[int, ...]) -> CachedPrefix | None:
        """Return the longest kept sequence that is a prefix of `prompt`, and remove it from the cache.

        Copy its keys and values before the next `keep`, which may return this slot.
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
