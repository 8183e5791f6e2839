"""Second, independent grader that must agree with `dakota1890.grading` on every reply.

It shares no code with `grading` or `orthography`: its letters are listed as printed instead of by base and
mark, the answer is found by splitting instead of indexing, and the edit distance starts from the other end.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

_PRINTED = {
    "ć": "ć č ċ",
    "š": "š ś ṡ",
    "ž": "ž ź ż",
    "ŋ": "ṇ ṅ n\u0304",
    "ġ": "ġ ǧ ğ ǵ",
    "ḣ": "ḣ ȟ",
    "ḳ": "ḳ ķ",
    "ṗ": "ṗ",
    "ṭ": "ṭ ṫ ț ţ",
    "a": "á ȧ",
    "e": "é ė",
    "i": "í i\u0307",
    "o": "ó ȯ",
    "u": "ú u\u0307",
}
_LETTER_OF = {
    unicodedata.normalize("NFD", printed): letter
    for letter, row in _PRINTED.items()
    for printed in row.split()
}
_ROMAN = frozenset("abcdefghijklmnopqrstuvwxyz' ")


def audited_reward(text: str, data: Mapping[str, Any], *, shaping: bool) -> float:
    """Return the reward of a reply, computed independently of `grading.grade`."""
    inside = _inside_tags(text.split("</think>")[-1])
    if not inside:
        return 0.0
    return _word_reward(inside, data, shaping)


def _word_reward(inside: str, data: Mapping[str, Any], shaping: bool) -> float:
    accept: Sequence[str] = data["accept"]
    if _written_length(inside) > 8 + 2 * len(max(accept, key=len)):
        return 0.0
    if data["answer"] == "number":
        inside = _ungrouped(inside)
    word = _spelled(inside)
    if any(word == form for form in accept):
        return 1.0
    several = any(separator in inside for separator in (",", ";", "/", "|", "\n"))
    several = several or bool({"or", "and"}.intersection(inside.split()[1:-1]))
    plain = _unmarked(word)
    if several or not word or not _ROMAN.issuperset(plain) or word in data["prompt_forms"]:
        return 0.0
    if plain in {_unmarked(form) for form in accept}:
        return 0.3
    if (
        not shaping
        or data["split"] != "train"
        or len(word.split(" ")) > max(len(form.split(" ")) for form in accept)
    ):
        return 0.0
    reached = max(_likeness(word, form) for form in accept)
    if reached <= 0.6:
        return 0.0
    shown = _already_shown(data["floor_forms"], accept)
    return max(0.0, 0.2 * (reached - shown) / (1.0 - shown)) if shown < 1.0 else 0.0


def _ungrouped(inside: str) -> str:
    """Return `2,536` or `2 536` without its separators, and other text unchanged."""
    first, *rest = inside.replace(" ", ",").split(",")
    all_digits = all(group.isascii() and group.isdecimal() for group in (first, *rest))
    grouped = rest and len(first) <= 3 and all(len(group) == 3 for group in rest)
    return "".join((first, *rest)) if all_digits and grouped else inside


def _inside_tags(said: str) -> str | None:
    before, *opened = said.split("<answer>")
    if len(opened) != 1 or "</answer>" in before:
        return None
    inside, *closed = opened[0].split("</answer>")
    return inside.strip() if len(closed) == 1 else None


def _written_length(inside: str) -> int:
    return len(unicodedata.normalize("NFC", inside))


def _spelled(inside: str) -> str:
    """Return `inside` in the canonical alphabet, read from its end, because marks follow their letter."""
    pieces: list[str] = []
    marks = ""
    for char in reversed(unicodedata.normalize("NFD", _plain_signs(inside.lower()))):
        if unicodedata.category(char) == "Cf":
            continue
        if unicodedata.combining(char):
            marks = char + marks
            continue
        pieces.append(_LETTER_OF.get(char + marks, char + marks))
        marks = ""
    joined = marks + "".join(reversed(pieces))
    return unicodedata.normalize("NFC", " ".join(joined.split())).strip(' .,:;!?"“”')


def _plain_signs(text: str) -> str:
    for sign in ("\u2018", "\u2019", "\u02bb", "\u02bc", "`"):
        text = text.replace(sign, "'")
    for sign in ("-", "\u2010", "\u2011"):
        text = text.replace(sign, "")
    return text


@lru_cache(maxsize=65_536)
def _unmarked(word: str) -> str:
    letters = [char for char in unicodedata.normalize("NFD", word) if not unicodedata.combining(char)]
    return "".join(letters).replace("ŋ", "n")


def _likeness(one: str, other: str) -> float:
    return 1.0 - edits_between(one, other) / max(len(one), len(other), 1)


def _already_shown(floor_forms: Sequence[str], accept: Sequence[str]) -> float:
    return max([0.6, *(_likeness(form, target) for form in floor_forms for target in accept)])


@lru_cache(maxsize=4_096)
def _places_from_the_end(word: str) -> dict[str, int]:
    """Return the positions of each letter of `word` as bits, with the last letter as the lowest."""
    places = dict.fromkeys(word, 0)
    for i, letter in enumerate(reversed(word)):
        places[letter] += 1 << i
    return places


def edits_between(one: str, other: str) -> int:
    """Return the edit distance from the end of both words, by the diagonal bits of Hyyrö (2003, figure 3)."""
    size = len(other)
    if size == 0:
        return len(one)
    where = _places_from_the_end(other)
    full = 2**size - 1
    plus, minus, score = full, 0, size
    for letter in reversed(one):
        match = where.get(letter, 0)
        diagonal = ((((match & plus) + plus) ^ plus) | match | minus) & full
        right_plus = (minus | ~(diagonal | plus)) & full
        right_minus = diagonal & plus
        if right_plus >> (size - 1):
            score += 1
        elif right_minus >> (size - 1):
            score -= 1
        shifted = (right_plus * 2 + 1) & full
        plus = (right_minus * 2 | ~(diagonal | shifted)) & full
        minus = diagonal & shifted
    return score
