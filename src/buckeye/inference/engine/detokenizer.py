"""Incremental conversion of token ids to text that ends before the first stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"
_CONTEXT = 4
_MAX_CHARACTER_TOKENS = 8
_MAX_BYTES = 4  # maximum length of a character in UTF-8


class IncrementalDetokenizer:
    """Text of a growing token sequence. `decode` converts token ids to text.

    `take` returns text only when later tokens cannot change it. So it holds back an incomplete character, and
    an end of the text that may become one of the stop strings `stops`. When a stop string is complete, the
    text ends before it.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stops = stops
        self._ids: list[int] = []
        self._settled = 0  # `text` contains the tokens before this index
        self.text = ""
        """All decoded text, without an incomplete character at the end, and without a stop string."""
        self._released = 0
        self.stopped = False

    def feed(self, ids: Sequence[int]) -> None:
        """Append tokens. Ignore all tokens after the one that completes a stop string."""
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
        """Add an incomplete character at the end to the text. Call this after the last token."""
        if not self.stopped:
            self._settle(final=True)

    @property
    def num_tokens(self) -> int:
        """Number of accepted tokens, up to the one that completed a stop string."""
        return len(self._ids)

    def take(self, *, final: bool = False) -> str:
        """Return the text that cannot change any more, without text that an earlier call returned."""
        held_back = 0 if final or self.stopped else partial_length(self.text, self._stops)
        end = len(self.text) - held_back
        part = self.text[self._released : end]
        self._released = max(self._released, end)
        return part

    def _settle(self, *, final: bool) -> None:
        # Some tokenizers remove the leading space of the first decoded token. So decode new tokens together
        # with a few earlier ones.
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
        """Return the text of the tokens from `start` on, and the index after its last token.

        Leave out an incomplete last character.
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
    """Return the length of the longest end of `text` that is the beginning of a marker.

    For example, the result for "a <th" and the marker "<think>" is 3.
    """
    longest = max(map(len, markers), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0
