"""What plays of one task gave, compared: state that they share is told from noise.

Noise is what differs between plays that nobody could have disturbed: times, random names, dice. State that
outlives a play differs between such plays too, and is told by its order: it grows, or counts, or is another
once and stays so.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

_NOISE = re.compile(
    r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}"
    r"|\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)?"
    r"|\b\d+(?:\.\d+)?\s?(?:[nmµu]?s|sec|seconds|milliseconds)\b"
    r"|\b\d\d?:\d\d(?::\d\d(?:[.,]\d+)?)?\b|\b\d{10,}(?:\.\d+)?\b|\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{7,}\b"
    r"|\b(?i:p?pid|process(?:\s+id)?)\W{1,3}\d+\b|/proc/\d+\b"
)
_TOKEN = re.compile(r"-?\d+(?:\.\d+)?|\w+|[^\w\s]")
_LONGEST = 60
OWN = "‹own›"


@dataclass(frozen=True, kw_only=True, slots=True)
class Play:
    """One play: a name and a text for everything that it gave, in order, and the word that only it has said.
    `processes` are the ids that the system had given out before and after it."""

    said: Sequence[tuple[str, str]]
    mark: str
    processes: tuple[int, int] = (0, 0)


def leaks(plays: Sequence[Play]) -> list[str]:
    """Where a play read the word that only another one has said: once for each of its calls."""
    found = {
        what: _around(text, text.index(other.mark))
        for play in plays
        for other in plays
        for what, text in play.said
        if other.mark != play.mark and other.mark in text
    }
    return [f"{what}: read what only another rollout has said: {text!r}" for what, text in found.items()]


def suspicious(before: Sequence[Play], beside: Sequence[Play], after: Sequence[Play]) -> list[str]:
    """What plays share, as far as these tell. `before` are two lone plays, `after` are lone ones too, after
    some that were played `beside` each other: one leaves a suspicion, nine settle it."""
    found = []
    for place, (what, _) in enumerate(before[0].said):
        everyone = [*before, *beside, *after]
        texts = iter(_without_processes([_text_of(play, place) for play in everyone], everyone))
        groups = [[next(texts) for _ in plays] for plays in (before, beside, after)]
        if (worst := _shares(*groups)) is not None:
            alone = groups[0][0]
            pairs = enumerate(zip(alone, worst, strict=False))
            at = next((place for place, (one, other) in pairs if one != other), 0)
            shown = f"{_around(alone, at)!r}, beside or after others {_around(worst, at)!r}"
            found.append(f"{what}: alone {shown}")
    return found


def _text_of(play: Play, place: int) -> str:
    """A text in which what may differ always has the same name."""
    if place >= len(play.said):
        return "(the rollout had ended)"
    return _NOISE.sub("#", play.said[place][1].replace(play.mark, OWN))


def _without_processes(texts: Sequence[str], plays: Sequence[Play]) -> list[str]:
    """The texts without the process ids in them. A number is one where, at its place in the texts, each play
    has a number that the system gave out during that play: small ids equal many numbers that are none."""
    tokens = [list(_TOKEN.finditer(text)) for text in texts]
    if len({len(found) for found in tokens}) > 1:
        return list(texts)
    columns = [
        place
        for place, column in enumerate(zip(*tokens, strict=True))
        if all(_is_process(match[0], play) for match, play in zip(column, plays, strict=True))
    ]
    shown = []
    for text, found in zip(texts, tokens, strict=True):
        for place in reversed(columns):
            text = f"{text[: found[place].start()]}#{text[found[place].end() :]}"
        shown.append(text)
    return shown


def _is_process(token: str, play: Play) -> bool:
    low, high = play.processes
    return token.lstrip("-").isdecimal() and low <= abs(int(token[:20])) <= high


def _shares(before: list[str], beside: list[str], after: list[str]) -> str | None:
    """The text that shows state which plays share; None if there is none, or if it is noise."""
    lone, everything = [*before, *after], [*before, *beside, *after]
    if _settled(lone, beside, len(before)):
        return next(text for text in everything if text != before[0])
    first, *_, last = everything
    one, several, more = ([_TOKEN.findall(text) for text in texts] for texts in (before, beside, after))
    if _grows(*([len(tokens) for tokens in each] for each in (one, several, more))):
        return last
    if len({len(tokens) for tokens in (*one, *several, *more)}) > 1:
        return None
    for place in range(len(one[0])):
        alone = [tokens[place] for tokens in (*one, *more)]
        side = [tokens[place] for tokens in several]
        if _settled(alone, side, len(before)) or _counts(alone, len(side)):
            return next((text for text in [*beside, last] if text != first), last)
    return None


def _settled(alone: Sequence[str], beside: Sequence[str], before: int) -> bool:
    """Whether lone plays agree and others do not, or lone ones changed once, after the first play or after
    those side by side, and stayed so."""
    changes = [place for place in range(1, len(alone)) if alone[place] != alone[place - 1]]
    if not changes:
        return any(text != alone[0] for text in beside)
    if len(changes) > 1:
        return False
    return set(beside) <= ({alone[-1]} if changes == [1] else set(alone) if changes == [before] else set())


def _grows(before: Sequence[int], beside: Sequence[int], after: Sequence[int]) -> bool:
    """Whether each play gives more than all before it, or less: chance does so with one of hundreds."""
    for sign in (1, -1):
        ordered = [sign * size for size in (*before, min(beside), max(beside), *after)]
        rising = [one < other for one, other in pairwise(ordered)]
        rising[len(before)] = True  # those side by side have no order
        if all(rising):
            return True
    return False


def _counts(alone: Sequence[str], beside: int) -> bool:
    """Whether numbers of lone plays go on by the same amount for each play, those side by side included."""
    try:
        numbers = [float(text) for text in alone]
    except ValueError:
        return False
    steps = [other - one for one, other in pairwise(numbers)]
    step = steps[0]
    wanted = [step, step * (beside + 1), *[step] * (len(steps) - 2)]
    return step != 0 and all(abs(one - other) < 1e-9 for one, other in zip(steps, wanted, strict=True))


def _around(text: str, at: int) -> str:
    """What stands at a place of a text, on one line."""
    start = max(0, at - _LONGEST // 2)
    line = " ".join(text[start : start + _LONGEST].split())
    return ("…" if start else "") + line + ("…" if start + _LONGEST < len(text) else "")
