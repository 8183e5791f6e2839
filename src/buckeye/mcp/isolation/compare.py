"""Compare the outputs of several rollouts of one task, and separate shared state from noise.

Noise, such as times and random names, differs in every rollout. Shared state changes in the order of the
rollouts. For example, an output grows, a number counts up, or a value changes once and stays.
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
_MAX_EXCERPT_CHARS = 60
_OWN_WORD = "‹own›"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeRollout:
    """Outputs of one rollout, for the comparison.

    `outputs` has the name and text of each output, in order. `mark` is a word that no other rollout writes.
    `processes` has the newest process id of the system before and after the rollout.
    """

    outputs: Sequence[tuple[str, str]]
    mark: str
    processes: tuple[int, int] = (0, 0)


def find_leaks(rollouts: Sequence[ProbeRollout]) -> list[str]:
    """Return a finding for each call whose result contains the `mark` of another rollout."""
    leaks = {
        name: _excerpt(text, text.index(other.mark))
        for rollout in rollouts
        for other in rollouts
        for name, text in rollout.outputs
        if other.mark != rollout.mark and other.mark in text
    }
    return [f"{name}: read text that only another rollout wrote: {text!r}" for name, text in leaks.items()]


def find_suspicious_outputs(
    before: Sequence[ProbeRollout], parallel: Sequence[ProbeRollout], after: Sequence[ProbeRollout]
) -> list[str]:
    """Return a finding for each output that looks like shared state.

    `before` has two rollouts that ran alone. `after` has the rollouts that ran alone after the `parallel`
    rollouts. With one rollout in `after`, a finding is only a suspicion. With nine, the finding is certain.
    """
    findings = []
    for index, (name, _) in enumerate(before[0].outputs):
        rollouts = [*before, *parallel, *after]
        texts = iter(_mask_process_ids([_normalize_output(rollout, index) for rollout in rollouts], rollouts))
        groups = [[next(texts) for _ in group] for group in (before, parallel, after)]
        if (differing := _find_shared_state(*groups)) is not None:
            alone = groups[0][0]
            pairs = enumerate(zip(alone, differing, strict=False))
            at = next((position for position, (left, right) in pairs if left != right), 0)
            with_others = f"during or after other rollouts: {_excerpt(differing, at)!r}"
            findings.append(f"{name}: alone: {_excerpt(alone, at)!r}, {with_others}")
    return findings


def _normalize_output(rollout: ProbeRollout, index: int) -> str:
    """Return an output with `#` in place of noise, and a fixed word in place of the rollout's `mark`."""
    if index >= len(rollout.outputs):
        return "(the rollout ended before this output)"
    return mask_noise(rollout.outputs[index][1].replace(rollout.mark, _OWN_WORD))


def mask_noise(text: str) -> str:
    """Return the text with `#` in place of times, durations, process ids and random ids."""
    return _NOISE.sub("#", text)


def _mask_process_ids(texts: Sequence[str], rollouts: Sequence[ProbeRollout]) -> list[str]:
    """Return the texts with `#` in place of process ids.

    A number is a process id if, in every rollout, the number at the same position is in the range of the
    process ids of that rollout. In a single rollout, a number could be in the range by chance.
    """
    tokens = [list(_TOKEN.finditer(text)) for text in texts]
    if len({len(matches) for matches in tokens}) > 1:
        return list(texts)
    columns = [
        index
        for index, column in enumerate(zip(*tokens, strict=True))
        if all(_is_process_id(match[0], rollout) for match, rollout in zip(column, rollouts, strict=True))
    ]
    masked = []
    for text, matches in zip(texts, tokens, strict=True):
        for index in reversed(columns):
            text = f"{text[: matches[index].start()]}#{text[matches[index].end() :]}"
        masked.append(text)
    return masked


def _is_process_id(token: str, rollout: ProbeRollout) -> bool:
    low, high = rollout.processes
    return token.lstrip("-").isdecimal() and low <= abs(int(token[:20])) <= high


def _find_shared_state(before: list[str], parallel: list[str], after: list[str]) -> str | None:
    """Return a text that reveals shared state, or None if the texts are equal or differ only by noise."""
    lone, all_texts = [*before, *after], [*before, *parallel, *after]
    if _changes_once(lone, parallel, len(before)):
        return next(text for text in all_texts if text != before[0])
    first, *_, last = all_texts
    groups = [[_TOKEN.findall(text) for text in texts] for texts in (before, parallel, after)]
    if _grows(*([len(tokens) for tokens in group] for group in groups)):
        return last
    if len({len(tokens) for group in groups for tokens in group}) > 1:
        return None
    for lone_tokens, parallel_tokens in zip(
        zip(*groups[0], *groups[2], strict=True), zip(*groups[1], strict=True), strict=True
    ):
        is_shared = _changes_once(lone_tokens, parallel_tokens, len(before))
        if is_shared or _counts(lone_tokens, len(parallel_tokens)):
            return next((text for text in [*parallel, last] if text != first), last)
    return None


def _changes_once(alone: Sequence[str], parallel: Sequence[str], before: int) -> bool:
    """Return True if a value changes once and stays, or if it differs only in parallel rollouts.

    The single change must follow the first rollout or the parallel rollouts.
    """
    changes = [index for index in range(1, len(alone)) if alone[index] != alone[index - 1]]
    if not changes:
        return any(text != alone[0] for text in parallel)
    if len(changes) > 1:
        return False
    return set(parallel) <= ({alone[-1]} if changes == [1] else set(alone) if changes == [before] else set())


def _grows(before: Sequence[int], parallel: Sequence[int], after: Sequence[int]) -> bool:
    """Return True if the sizes only increase or only decrease over the rollouts.

    Noise has this order only once in several hundred cases.
    """
    for sign in (1, -1):
        ordered = [sign * size for size in (*before, min(parallel), max(parallel), *after)]
        rising = [left < right for left, right in pairwise(ordered)]
        rising[len(before)] = True  # parallel rollouts have no order
        if all(rising):
            return True
    return False


def _counts(alone: Sequence[str], parallel: int) -> bool:
    """Return True if every rollout, including the parallel rollouts, changes a number by the same step."""
    try:
        numbers = [float(text) for text in alone]
    except ValueError:
        return False
    steps = [right - left for left, right in pairwise(numbers)]
    step = steps[0]
    expected = [step, step * (parallel + 1), *[step] * (len(steps) - 2)]
    return step != 0 and all(abs(a - b) < 1e-9 for a, b in zip(steps, expected, strict=True))


def _excerpt(text: str, at: int) -> str:
    """Return the text around a position, on one line."""
    start = max(0, at - _MAX_EXCERPT_CHARS // 2)
    end = start + _MAX_EXCERPT_CHARS
    return ("…" if start else "") + " ".join(text[start:end].split()) + ("…" if end < len(text) else "")
