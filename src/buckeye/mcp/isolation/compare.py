"""Comparison of several rollouts of one task, to separate shared state from noise.

Noise differs even between undisturbed rollouts: times, random names, dice. Shared state also differs between
rollouts, but its order reveals it: it grows, counts, or changes once and stays changed.
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
class ProbeRollout:
    """One rollout for the comparison.

    `outputs` has a name and a text for each output, in order. `mark` is a word that only this rollout has
    written. `processes` are the last process ids of the system before and after it.
    """

    outputs: Sequence[tuple[str, str]]
    mark: str
    processes: tuple[int, int] = (0, 0)


def find_leaks(plays: Sequence[ProbeRollout]) -> list[str]:
    """Return a finding for each call that read a word which only another rollout has written."""
    found = {
        what: _around(text, text.index(other.mark))
        for play in plays
        for other in plays
        for what, text in play.outputs
        if other.mark != play.mark and other.mark in text
    }
    return [f"{what}: read what only another rollout has said: {text!r}" for what, text in found.items()]


def find_suspicious_outputs(
    before: Sequence[ProbeRollout], parallel: Sequence[ProbeRollout], after: Sequence[ProbeRollout]
) -> list[str]:
    """Return the outputs in which rollouts seem to share state.

    The first argument has two lone rollouts, the second the parallel ones, and `after` has lone rollouts
    after these: one is enough for a suspicion, nine confirm it.
    """
    found = []
    for place, (what, _) in enumerate(before[0].outputs):
        everyone = [*before, *parallel, *after]
        texts = iter(_without_processes([_text_of(play, place) for play in everyone], everyone))
        groups = [[next(texts) for _ in plays] for plays in (before, parallel, after)]
        if (worst := _shares(*groups)) is not None:
            alone = groups[0][0]
            pairs = enumerate(zip(alone, worst, strict=False))
            at = next((place for place, (one, other) in pairs if one != other), 0)
            shown = f"{_around(alone, at)!r}, beside or after others {_around(worst, at)!r}"
            found.append(f"{what}: alone {shown}")
    return found


def _text_of(play: ProbeRollout, place: int) -> str:
    """Return an output with noise and the rollout's own word replaced by fixed names."""
    if place >= len(play.outputs):
        return "(the rollout had ended)"
    return _NOISE.sub("#", play.outputs[place][1].replace(play.mark, OWN))


def _without_processes(texts: Sequence[str], plays: Sequence[ProbeRollout]) -> list[str]:
    """Return the texts with process ids replaced by `#`.

    A number counts as a process id only if at its place every rollout has a number that the system assigned
    during that rollout. Small process ids equal many other numbers.
    """
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


def _is_process(token: str, play: ProbeRollout) -> bool:
    low, high = play.processes
    return token.lstrip("-").isdecimal() and low <= abs(int(token[:20])) <= high


def _shares(before: list[str], parallel: list[str], after: list[str]) -> str | None:
    """Return a text that reveals shared state; None if only noise differs, or nothing."""
    lone, everything = [*before, *after], [*before, *parallel, *after]
    if _settled(lone, parallel, len(before)):
        return next(text for text in everything if text != before[0])
    first, *_, last = everything
    one, several, more = ([_TOKEN.findall(text) for text in texts] for texts in (before, parallel, after))
    if _grows(*([len(tokens) for tokens in each] for each in (one, several, more))):
        return last
    if len({len(tokens) for tokens in (*one, *several, *more)}) > 1:
        return None
    for place in range(len(one[0])):
        alone = [tokens[place] for tokens in (*one, *more)]
        side = [tokens[place] for tokens in several]
        if _settled(alone, side, len(before)) or _counts(alone, len(side)):
            return next((text for text in [*parallel, last] if text != first), last)
    return None


def _settled(alone: Sequence[str], parallel: Sequence[str], before: int) -> bool:
    """Return True if lone rollouts agree and parallel ones differ, or if the lone ones changed only once.

    The change must follow the first rollout or the parallel ones, and persist.
    """
    changes = [place for place in range(1, len(alone)) if alone[place] != alone[place - 1]]
    if not changes:
        return any(text != alone[0] for text in parallel)
    if len(changes) > 1:
        return False
    return set(parallel) <= ({alone[-1]} if changes == [1] else set(alone) if changes == [before] else set())


def _grows(before: Sequence[int], parallel: Sequence[int], after: Sequence[int]) -> bool:
    """Return True if each rollout gives more than all before it, or each gives less.

    The probability of this by chance is one in several hundred.
    """
    for sign in (1, -1):
        ordered = [sign * size for size in (*before, min(parallel), max(parallel), *after)]
        rising = [one < other for one, other in pairwise(ordered)]
        rising[len(before)] = True  # parallel rollouts have no order
        if all(rising):
            return True
    return False


def _counts(alone: Sequence[str], parallel: int) -> bool:
    """Return True if lone numbers change by a constant step per rollout, counting the parallel ones."""
    try:
        numbers = [float(text) for text in alone]
    except ValueError:
        return False
    steps = [other - one for one, other in pairwise(numbers)]
    step = steps[0]
    wanted = [step, step * (parallel + 1), *[step] * (len(steps) - 2)]
    return step != 0 and all(abs(one - other) < 1e-9 for one, other in zip(steps, wanted, strict=True))


def _around(text: str, at: int) -> str:
    """Return the surroundings of a position in a text, on one line."""
    start = max(0, at - _LONGEST // 2)
    line = " ".join(text[start : start + _LONGEST].split())
    return ("…" if start else "") + line + ("…" if start + _LONGEST < len(text) else "")
