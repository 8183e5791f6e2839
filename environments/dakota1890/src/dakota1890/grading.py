"""Rewards of replies: deterministic, order-sensitive, and with a maximum of 1.0 for every task.

    exact       any accepted form, in any Unicode encoding or historical spelling          1.0
    diacritics  an accepted form with marks missing or wrong (n for ŋ, s for š)            0.3
    near        training only: how much closer than the forms in the prompt                at most 0.2
    anything else: wrong, an echo, several answers, not Dakota letters, empty, too long    0.0

The answer is the text in the one `<answer>...</answer>` of the reply, after its reasoning. Reasoning is free.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dakota1890.orthography import canonical, strip_diacritics
from dakota1890.questions import NUMBER

DIACRITIC_REWARD = 0.3
SHAPING_CEILING = 0.2
SHAPING_FLOOR = 0.6
"""Minimum similarity for a near miss to be rewarded."""

_OPEN, _CLOSE = "<answer>", "</answer>"
_END_OF_REASONING = "</think>"
_SEVERAL = re.compile(r"[,;/|\n]|\s(?:or|and)\s")
_NOT_DAKOTA = re.compile(r"[^a-z' ]")
_GROUPED_DIGITS = re.compile(r"[0-9]{1,3}(?:[, ][0-9]{3})+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Grade:
    """Reward, its reason (exact, diacritics, near, wrong, echo, several, ...), and logged components."""

    reward: float
    tier: str
    components: Mapping[str, float]


def grade(text: str, data: Mapping[str, Any], *, shaping: bool, truncated: bool = False) -> Grade:
    """Return the grade of a reply `text` to a task with `data`, whose fields `questions.Question` describes.

    Near misses are never rewarded on held-out tasks, for any value of `shaping`.
    """
    answer = extract_answer(text)
    if answer is None:
        return _make_grade("truncated" if truncated else "format", 0.0, 0.0, truncated)
    accept: Sequence[str] = data["accept"]
    tier, folded = _classify(answer, data)
    similarity = 0.0 if folded is None else max(_similarity(folded, form) for form in accept)
    reward = {"exact": 1.0, "diacritics": DIACRITIC_REWARD}.get(tier, 0.0)
    if tier == "wrong" and shaping and data["split"] == "train" and data["answer"] != NUMBER:
        reward = near_reward(similarity, accept, data["floor_forms"])
        tier = "near" if reward > 0 else tier
    return _make_grade(tier, reward, similarity, truncated)


def extract_answer(text: str) -> str | None:
    """Return the content of the one answer tag after the reasoning; None if there is not exactly one."""
    after_reasoning = text.rpartition(_END_OF_REASONING)[2]
    if after_reasoning.count(_OPEN) != 1 or after_reasoning.count(_CLOSE) != 1:
        return None
    start, end = after_reasoning.index(_OPEN) + len(_OPEN), after_reasoning.index(_CLOSE)
    return after_reasoning[start:end].strip() if start <= end else None


def near_reward(similarity: float, accept: Sequence[str], floor_forms: Sequence[str]) -> float:
    """Return 0.2 x (sim - b) / (1 - b), at least 0; b is the similarity of `floor_forms`, at least 0.6."""
    shown = [_similarity(word, form) for word in floor_forms for form in accept]
    floor = max([SHAPING_FLOOR, *shown])
    return SHAPING_CEILING * (similarity - floor) / (1.0 - floor) if similarity > floor else 0.0


def _classify(answer: str, data: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return the tier before shaping, and the folded answer if it is comparable with the accepted forms."""
    accept: Sequence[str] = data["accept"]
    if len(unicodedata.normalize("NFC", answer)) > 2 * max(map(len, accept)) + 8:
        return "long", None
    if data["answer"] == NUMBER and _GROUPED_DIGITS.fullmatch(answer):
        answer = answer.replace(",", "").replace(" ", "")
    folded = canonical(answer)
    if not folded:
        return "empty", None
    if folded in accept:
        return "exact", folded
    if _SEVERAL.search(answer):
        return "several", None
    if _NOT_DAKOTA.search(strip_diacritics(folded)):
        return "script", None
    if folded in data["prompt_forms"]:
        return "echo", folded
    if strip_diacritics(folded) in map(strip_diacritics, accept):
        return "diacritics", folded
    if folded.count(" ") > max(form.count(" ") for form in accept):
        return "several", folded
    return "wrong", folded


def _make_grade(tier: str, reward: float, similarity: float, truncated: bool) -> Grade:
    components = {
        "exact": float(tier == "exact"),
        "ortho_miss": float(tier == "diacritics"),
        "sim": similarity,
        "format_ok": float(tier not in ("format", "truncated", "empty")),
        "truncated": float(truncated),
    }
    return Grade(reward=reward, tier=tier, components=components)


def _similarity(first: str, second: str) -> float:
    """Return 1 - Levenshtein distance / length of the longer text."""
    if first == second:
        return 1.0
    return 1.0 - levenshtein(first, second) / max(len(first), len(second))


def levenshtein(first: str, second: str) -> int:
    """Return the edit distance, one column of the matrix at a time as bits of an integer (Myers 1999)."""
    if not first:
        return len(second)
    positions: dict[str, int] = {}
    for i, char in enumerate(first):
        positions[char] = positions.get(char, 0) | 1 << i
    all_bits, bottom = (1 << len(first)) - 1, 1 << (len(first) - 1)
    rises, falls, distance = all_bits, 0, len(first)
    for char in second:
        equal = positions.get(char, 0)
        across = equal | falls
        along = (((equal & rises) + rises) ^ rises) | equal
        up, down = falls | (all_bits & ~(along | rises)), rises & along
        distance += bool(up & bottom) - bool(down & bottom)
        up, down = (up << 1) | 1, down << 1
        rises, falls = (down | ~(across | up)) & all_bits, up & across & all_bits
    return distance
