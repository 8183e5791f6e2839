"""One canonical spelling for all encodings and printings of a Dakota word.

The canonical alphabet is `a b ć d e ġ g h ḣ i k ḳ m n ŋ o p ṗ s š t ṭ u w y z ž '`, composed (NFC), lower
case, without stress accents. Stress accents, the historical variants of a letter (ś ṡ for š, ǧ ğ for ġ, ṅ n̄
for ŋ ...), decomposed or invisible characters and syllable hyphens do not change the word and are folded. A
plain letter in place of a marked one (n for ŋ, s for š) is a different letter: it is folded only in
`strip_diacritics`.
"""

from __future__ import annotations

import unicodedata
from functools import lru_cache

_ACUTE, _CARON, _DOT, _BREVE = "\u0301", "\u030c", "\u0307", "\u0306"
_DOT_BELOW, _CEDILLA, _COMMA_BELOW, _MACRON = "\u0323", "\u0327", "\u0326", "\u0304"

# base letter -> (the marks printed or encoded for it, the canonical letter)
_LETTERS: dict[str, tuple[str, str]] = {
    "c": (_ACUTE + _CARON + _DOT, "ć"),
    "s": (_CARON + _ACUTE + _DOT, "š"),
    "z": (_CARON + _ACUTE + _DOT, "ž"),
    "g": (_DOT + _CARON + _BREVE + _ACUTE, "ġ"),
    "h": (_DOT + _CARON, "ḣ"),
    "k": (_DOT_BELOW + _CEDILLA, "ḳ"),
    "n": (_DOT_BELOW + _DOT + _MACRON, "ŋ"),
    "p": (_DOT, "ṗ"),
    "t": (_DOT_BELOW + _DOT + _COMMA_BELOW + _CEDILLA, "ṭ"),
}
_FOLDED = {base + mark: letter for base, (marks, letter) in _LETTERS.items() for mark in marks}
_FOLDED |= {vowel + mark: vowel for vowel in "aeiou" for mark in (_ACUTE, _DOT)}
_APOSTROPHES = dict.fromkeys(map(ord, "\u2019\u02bc\u2018\u02bb`"), "'")
_HYPHENS = dict.fromkeys(map(ord, "-\u2010\u2011"))
_OUTER = ' .!?;:,"“”'

ALPHABET = frozenset("abćdeġghḣikḳmnŋopṗsštṭuwyzž' ")


def canonical(text: str) -> str:
    """Return the spelling of `text` in the canonical alphabet; other characters are kept."""
    text = text.lower()
    if ALPHABET.issuperset(text):
        return " ".join(text.split())
    return _fold(text)


@lru_cache(maxsize=65_536)
def _fold(text: str) -> str:
    decomposed = unicodedata.normalize("NFD", text.translate(_APOSTROPHES).translate(_HYPHENS))
    letters: list[str] = []
    for char in decomposed:
        if unicodedata.category(char) == "Cf":
            continue
        if unicodedata.combining(char) and letters:
            letters[-1] += char
        else:
            letters.append(char)
    folded = "".join(_FOLDED.get(letter, letter) for letter in letters)
    return unicodedata.normalize("NFC", " ".join(folded.split())).strip(_OUTER)


@lru_cache(maxsize=65_536)
def strip_diacritics(text: str) -> str:
    """Return canonical `text` without diacritics and with n for ŋ, as if its marks were lost."""
    decomposed = unicodedata.normalize("NFD", text.replace("ŋ", "n"))
    return "".join(char for char in decomposed if not unicodedata.combining(char))
