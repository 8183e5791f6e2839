"""Incremental detokenization: whole characters only, cut at the first stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"
_CONTEXT = 4
_MAX_CHARACTER_TOKENS = 8
_MAX_BYTES = 4  # of a character in UTF-8


class IncrementalDetokenizer:
    """Text of a growing token sequence. `decode` converts token ids to text.

    Text is released once it cannot change. An incomplete character is held back, and so is an end that may
    become one of the `stops`. When a stop string appears, the text ends before it.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stops = stops
        self._ids: list[int] = []
        self._settled = 0  # tokens before this index are final
        self.text = ""
        """All decoded text, without the parts held back."""
        self._released = 0
        self.stopped = False

    def feed(self, ids: Sequence[int]) -> None:
        """Append tokens, one by one, until a stop string is complete."""
        if not self._stops:
            self._ids += ids
            self._settle(final=False)
            return
        for token in ids:
            if self.stopped:
                return
            self._ids.append(token)
            self._settle(final=False)

    def finish(self) -> None:
        """Release all text: no more tokens follow."""
        if not self.stopped:
            self._settle(final=True)

    @property
    def num_tokens(self) -> int:
        """Number of accepted tokens, up to the one that completed a stop string."""
        return len(self._ids)

    def take(self, *, final: bool = False) -> str:
        """Return the text that is certain and was not returned before."""
        held_back = 0 if final or self.stopped else partial_length(self.text, self._stops)
        end = len(self.text) - held_back
        part = self.text[self._released : end]
        self._released = max(self._released, end)
        return part

    def _settle(self, *, final: bool) -> None:
        # Tokenizers may treat the first decoded token differently (a word's leading space), so new tokens are
        # decoded after a few settled ones.
        start = max(0, self._settled - _CONTEXT)
        context_text = self._decode(self._ids[start : self._settled])
        text = self._decode(self._ids[start:])
        pending = len(self._ids) - self._settled
        end = len(self._ids)
        if text.endswith(_REPLACEMENT) and not final:
            if pending < _MAX_CHARACTER_TOKENS:
                return
            text, end = self._without_incomplete(start, text)
        before = len(self.text)
        self.text += text[len(context_text) :]
        self._settled = end
        self._find_stop(before)

    def _without_incomplete(self, start: int, text: str) -> tuple[str, int]:
        """Return the text from token `start` on and the end of its tokens.

        An incomplete last character is left out.
        """
        for cut in range(1, _MAX_BYTES):
            whole = self._decode(self._ids[start:-cut])
            if text == whole + _REPLACEMENT and len(self._ids) - cut > self._settled:
                return whole, len(self._ids) - cut
        return text, len(self._ids)

    def _find_stop(self, before: int) -> None:
        longest = max(map(len, self._stops), default=0)
        start = max(0, before - longest + 1)
        positions = [at for stop in self._stops if (at := self.text.find(stop, start)) >= 0]
        if positions:
            self.text = self.text[: min(positions)]
            self.stopped = True


def partial_length(text: str, markers: Sequence[str]) -> int:
    """Return the length of the longest end of a text that begins one of the markers."""
    longest = max(map(len, markers), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0
