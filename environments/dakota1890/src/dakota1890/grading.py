"""What a reply is worth. Deterministic, order-sensitive, and the same ceiling of 1.0 for every task.

    exact       any accepted form, in any Unicode encoding or historical spelling          1.0
    diacritics  an accepted form with marks missing or wrong (n for ŋ, s for š)            0.3
    near        training only: how much closer than what the prompt already shows          at most 0.2
    anything else: wrong, an echo, several answers, not Dakota letters, empty, too long    0.0

Where the marks are what is asked for (`marks_matter`), their loss is worth nothing. The answer is what stands
in the one `<answer>...</answer>` of the reply, after its reasoning. Reasoning is free.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from dakota1890.orthography import bare, canonical
from dakota1890.questions import FORM, JSON, NUMBER, WORD, WORDS

DIACRITIC_REWARD = 0.3
SHAPING_CEILING = 0.2
SHAPING_FLOOR = 0.6
"""Similarity below which a near miss earns nothing."""
LONGEST_JSON = 400

_OPEN, _CLOSE = "<answer>", "</answer>"
_END_OF_REASONING = "</think>"
_SEVERAL = re.compile(r"[,;/|\n]|\s(?:or|and)\s")
_NOT_DAKOTA = re.compile(r"[^a-z' ]")
_GROUPED_DIGITS = re.compile(r"[0-9]{1,3}(?:[, ][0-9]{3})+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Grade:
    """A reward, its reason (exact, diacritics, near, wrong, echo, several, ...), and what is logged."""

    reward: float
    tier: str
    components: Mapping[str, float]


def grade(text: str, data: Mapping[str, Any], *, shaping: bool, truncated: bool = False) -> Grade:
    """The grade of a reply `text` to a task with `data` (see `questions.Question`)."""
    answer = extract_answer(text)
    if answer is None:
        return _graded("truncated" if truncated else "format", 0.0, 0.0, truncated)
    accept: Sequence[str] = data["accept"]
    tier, folded = _classify(answer, data)
    if tier == "exact":
        return _graded(tier, 1.0, 1.0, truncated)
    if folded is None:
        return _graded(tier, 0.0, 0.0, truncated)
    similarity = _closeness(folded, accept)
    if tier == "diacritics":
        return _graded(tier, 0.0 if data["marks_matter"] else DIACRITIC_REWARD, similarity, truncated)
    shaped = shaping and tier == "wrong" and data["answer"] in (FORM, WORDS, WORD)
    reward = near_reward(similarity, accept, data["floor_forms"]) if shaped else 0.0
    return _graded("near" if reward > 0 else tier, reward, similarity, truncated)


def extract_answer(text: str) -> str | None:
    """What the one answer tag after the reasoning holds, or None where there is not exactly one."""
    said = text.rpartition(_END_OF_REASONING)[2]
    if said.count(_OPEN) != 1 or said.count(_CLOSE) != 1:
        return None
    start, end = said.index(_OPEN) + len(_OPEN), said.index(_CLOSE)
    return said[start:end].strip() if start <= end else None


def near_reward(similarity: float, accept: Sequence[str], floor_forms: Sequence[str]) -> float:
    """0.2 x (sim - b) / (1 - b), at least 0; b is what `floor_forms` already reach, and at least 0.6."""
    if similarity <= SHAPING_FLOOR:
        return 0.0
    floor = _floor(accept, floor_forms)
    return SHAPING_CEILING * (similarity - floor) / (1.0 - floor) if similarity > floor else 0.0


def _floor(accept: Sequence[str], floor_forms: Sequence[str]) -> float:
    return max([SHAPING_FLOOR, *(_similarity(shown, form) for shown in floor_forms for form in accept)])


def _classify(answer: str, data: Mapping[str, Any]) -> tuple[str, str | None]:
    """The tier before shaping, and the folded answer where it can be compared with the accepted forms."""
    if not answer:
        return "empty", None
    accept: Sequence[str] = data["accept"]
    if data["answer"] == JSON:
        return _classify_json(answer, accept, data["keys"])
    if len(unicodedata.normalize("NFC", answer)) > 2 * max(map(len, accept)) + 8:
        return "long", None
    if data["answer"] == NUMBER and _GROUPED_DIGITS.fullmatch(answer):
        answer = answer.replace(",", "").replace(" ", "")
    return _classify_form(answer, accept, data["prompt_forms"])


def _classify_json(answer: str, accept: Sequence[str], keys: Sequence[str]) -> tuple[str, str | None]:
    values = json_values(answer, keys) if len(answer) <= LONGEST_JSON else None
    if values is None:
        return "malformed", None
    accepted = _values_of(tuple(accept), tuple(keys))
    if values in accepted:
        return "exact", values
    # No shaping: every value but one can be right by chance.
    return ("diacritics", values) if _matches_bare(values, accepted) else ("wrong values", values)


@lru_cache(maxsize=4_096)
def _values_of(accept: tuple[str, ...], keys: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(str(json_values(answer, keys)) for answer in accept)


def json_values(answer: str, keys: Sequence[str]) -> str | None:
    """The canonical values of a JSON object in the order of `keys`, joined by spaces (their own spaces as _).

    None unless it is an object with exactly these keys, each once, whose values are texts or whole numbers.
    """
    try:
        pairs = json.loads(answer, object_pairs_hook=_Pairs)
    except (ValueError, RecursionError):
        return None
    if not isinstance(pairs, _Pairs) or sorted(key for key, _ in pairs) != sorted(keys):
        return None
    given = dict(pairs)
    if any(isinstance(value, bool) or not isinstance(value, (str, int)) for value in given.values()):
        return None
    values = [canonical(str(given[key])).replace(" ", "_") for key in keys]
    return " ".join(values) if all(values) else None


class _Pairs(list[tuple[str, Any]]):
    """The pairs of a JSON object, so that a repeated key is seen."""


def _classify_form(answer: str, accept: Sequence[str], prompt_forms: Sequence[str]) -> tuple[str, str | None]:
    folded = canonical(answer)
    if not folded:
        return "empty", None
    if folded in accept:
        return "exact", folded
    if _SEVERAL.search(answer):
        return "several", None
    if _NOT_DAKOTA.search(bare(folded)):
        return "script", None
    if folded in prompt_forms:
        return "echo", folded
    if _matches_bare(folded, accept):
        return "diacritics", folded
    if folded.count(" ") > max(form.count(" ") for form in accept):
        return "several", folded
    return "wrong", folded


def _matches_bare(folded: str, accept: Sequence[str]) -> bool:
    plain = bare(folded)
    return any(plain == bare(form) for form in accept)


def _graded(tier: str, reward: float, similarity: float, truncated: bool) -> Grade:
    components = {
        "exact": float(tier == "exact"),
        "ortho_miss": float(tier == "diacritics"),
        "sim": similarity,
        "format_ok": float(tier not in ("format", "truncated", "empty", "malformed")),
        "truncated": float(truncated),
    }
    return Grade(reward=reward, tier=tier, components=components)


def _closeness(folded: str, accept: Sequence[str]) -> float:
    """The similarity to the nearest accepted form. A form whose length alone makes it too far is passed
    over."""
    best = 0.0
    for form in accept:
        longer = max(len(folded), len(form))
        if 1.0 - abs(len(folded) - len(form)) / longer > best:
            best = max(best, _similarity(folded, form))
    return best


def _similarity(one: str, other: str) -> float:
    """1 - Levenshtein distance / length of the longer."""
    if one == other:
        return 1.0
    return 1.0 - levenshtein(one, other) / max(len(one), len(other))


def _common_start(one: str, other: str) -> int:
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return length


def levenshtein(one: str, other: str) -> int:
    """The edit distance, a column of the matrix at a time as bits of an integer (Myers 1999, figure 8)."""
    start = _common_start(one, other)
    one, other = one[start:], other[start:]
    end = _common_start(one[::-1], other[::-1])
    one, other = one[: len(one) - end], other[: len(other) - end]
    if not one:
        return len(other)
    places: dict[str, int] = {}
    for i, char in enumerate(one):
        places[char] = places.get(char, 0) | 1 << i
    every, bottom = (1 << len(one)) - 1, 1 << (len(one) - 1)
    rises, falls, distance = every, 0, len(one)
    for char in other:
        equal = places.get(char, 0)
        across = equal | falls
        along = (((equal & rises) + rises) ^ rises) | equal
        up, down = falls | (every & ~(along | rises)), rises & along
        distance += bool(up & bottom) - bool(down & bottom)
        up, down = (up << 1) | 1, down << 1
        rises, falls = (down | ~(across | up)) & every, up & across & every
    return distance
