"""A second grader, written differently, that must agree with `grading` on every reply.

It shares no code with `grading` or `orthography`: its letters are listed as printed instead of by base and
mark, the answer is found by splitting instead of indexing, and the edit distance runs from the other end.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

_TOLERANCE = 1e-9
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
_TEXT = r'"(?:[^"\\]|\\.)*"'
_INTEGER = r"-?(?:0|[1-9][0-9]*)"
_GAP = r"[ \t\r\n]*"
_PAIR = re.compile(rf"({_TEXT}){_GAP}:{_GAP}(?:({_TEXT})|({_INTEGER}))")
_ONE = rf"{_TEXT}{_GAP}:{_GAP}(?:{_TEXT}|{_INTEGER})"
_OBJECT = re.compile(rf"{{{_GAP}{_ONE}(?:{_GAP},{_GAP}{_ONE})*{_GAP}}}", re.DOTALL)


class GradeMismatchError(Exception):
    """The two graders disagree on a reply: one of them is wrong, and no reward may be paid."""


def check_reward(reward: float, text: str, data: Mapping[str, Any], *, shaping: bool) -> None:
    """Raise GradeMismatchError unless recomputing the reward of `text` gives `reward`."""
    recomputed = audited_reward(text, data, shaping=shaping)
    if abs(recomputed - reward) > _TOLERANCE:
        raise GradeMismatchError(
            f"the reward {reward} was recomputed as {recomputed} for the reply {text[-200:]!r}"
        )


def audited_reward(text: str, data: Mapping[str, Any], *, shaping: bool) -> float:
    """The reward of a reply, worked out independently of `grading.grade`."""
    inside = _inside_tags(text.split("</think>")[-1])
    if not inside:
        return 0.0
    if data["answer"] == "JSON":
        return _object_reward(inside, data)
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
        return 0.0 if data["marks_matter"] else 0.3
    if (
        not shaping
        or data["answer"] == "meaning"
        or len(word.split(" ")) > max(len(form.split(" ")) for form in accept)
    ):
        return 0.0
    reached = max(_likeness(word, form) for form in accept)
    if reached <= 0.6:
        return 0.0
    shown = _already_shown(data["floor_forms"], accept)
    return max(0.0, 0.2 * (reached - shown) / (1.0 - shown)) if shown < 1.0 else 0.0


def _object_reward(inside: str, data: Mapping[str, Any]) -> float:
    """1 or 0.3 for an object with the right values, read by a pattern instead of a JSON parser."""
    given = _flat_object(inside) if len(inside) <= 400 else None
    if given is None or set(given) != set(data["keys"]):
        return 0.0
    said = _object_values(inside, data["keys"])
    if "" in said:
        return 0.0
    meant = [_object_values(form, data["keys"]) for form in data["accept"]]
    if said in meant:
        return 1.0
    lost = [_unmarked(value) for value in said] in [[_unmarked(v) for v in values] for values in meant]
    return 0.3 if lost and not data["marks_matter"] else 0.0


def _object_values(written: str, keys: Sequence[str]) -> list[str]:
    given = _flat_object(written)
    assert given is not None, f"the accepted answer {written!r} is no object"
    return ["_".join(_spelled(given[key]).split(" ")) for key in keys]


def _flat_object(inside: str) -> dict[str, str] | None:
    """The texts and whole numbers of `{"key": value, ...}`; None for anything else or a repeated key."""
    if not _OBJECT.fullmatch(inside):
        return None
    pairs = _PAIR.findall(inside)
    try:
        named = [
            (json.loads(key), json.loads(text) if text else str(int(digits))) for key, text, digits in pairs
        ]
    except ValueError:  # an escape or a control character that JSON does not have
        return None
    return dict(named) if len(dict(named)) == len(named) else None


def _ungrouped(inside: str) -> str:
    """`2,536` or `2 536` without its separators; anything else as it is."""
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
    """`inside` in the canonical alphabet, read from its end: marks wait until their letter comes."""
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
    """Each letter of `word` with its places as bits, the last letter's being the lowest."""
    places = dict.fromkeys(word, 0)
    for i, letter in enumerate(reversed(word)):
        places[letter] += 1 << i
    return places


def edits_between(one: str, other: str) -> int:
    """The edit distance from the end of both words, by the diagonal bits of Hyyrö (2003, figure 3)."""
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
