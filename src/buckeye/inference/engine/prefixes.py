"""Which prompts the cache holds: those of running sequences, and what is kept of those that have ended."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from buckeye.inference.engine.sequences import Sequence


class RunningPrompts:
    """The running sequences by prompt: whose keys and values another of the same prompt may copy."""

    def __init__(self) -> None:
        self._sequences: dict[tuple[int, ...], dict[Sequence, None]] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def sibling(self, prompt: tuple[int, ...]) -> Sequence | None:
        """The first that has this prompt."""
        return next(iter(self._sequences.get(prompt, ())), None)

    def add(self, sequence: Sequence) -> None:
        """From now on the prompt of `sequence` is in its slot."""
        self._sequences.setdefault(sequence.prompt_ids, {})[sequence] = None

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, if it is here."""
        siblings = self._sequences.get(sequence.prompt_ids)
        if siblings is not None:
            siblings.pop(sequence, None)
            if not siblings:
                del self._sequences[sequence.prompt_ids]

    def clear(self) -> None:
        """Forget all."""
        self._sequences.clear()


class Kept(NamedTuple):
    """Keys and values of the first `length` positions, in the cache's slot `slot`."""

    slot: int
    length: int


class KeptPrefixes:
    """Sequences that have ended and whose keys and values lie in spare slots of the cache, for prompts that
    go on where one of them ended: the next turn of a conversation. The one kept longest ago gives way.

    Only a prompt that begins with all of a kept sequence finds it. So what a prompt is computed from depends
    on its own conversation, not on what else was sampled before.
    """

    def __init__(self, slots: range) -> None:
        self._free = list(slots)
        self._tokens: OrderedDict[int, tuple[int, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tokens)

    def keep(self, tokens: tuple[int, ...]) -> int | None:
        """The slot to copy the keys and values of `tokens` to; None if there are no spare slots."""
        if self._free:
            slot = self._free.pop()
        elif self._tokens:
            slot, _ = self._tokens.popitem(last=False)
        else:
            return None
        self._tokens[slot] = tokens
        return slot

    def take(self, prompt: tuple[int, ...]) -> Kept | None:
        """The longest kept sequence that `prompt` goes on from. It is no longer kept: its slot may be
        overwritten by the next `keep`."""
        best: int | None = None
        for slot, tokens in self._tokens.items():
            longer = best is None or len(tokens) > len(self._tokens[best])
            if longer and len(tokens) < len(prompt) and prompt[: len(tokens)] == tokens:
                best = slot
        if best is None:
            return None
        self._free.append(best)
        return Kept(best, len(self._tokens.pop(best)))

    def clear(self) -> None:
        """Keep nothing."""
        self._free.extend(self._tokens)
        self._tokens.clear()
