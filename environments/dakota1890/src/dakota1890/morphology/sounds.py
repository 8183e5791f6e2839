"""Sound rules that several paradigms share."""

from __future__ import annotations

VOWELS = "aeiou"
_WEAKENED = {"k": "g", "p": "m", "t": "n", "z": "s", "ž": "š"}


def final_e(form: str) -> str:
    """Return `form` with its final a or aŋ as e (PHON-02)."""
    if form.endswith("aŋ"):
        return form[:-2] + "e"
    return form[:-1] + "e" if form.endswith("a") else form


def with_we(stem: str) -> str:
    """Return `stem` with uŋ, which is uŋk before a vowel (PHON-06)."""
    return ("uŋk" if stem[0] in VOWELS else "uŋ") + stem


def after_i(stem: str) -> str:
    """Return `stem` as spelled after ki, kići and ći: k before a vowel is ć (PHON-03)."""
    return "ć" + stem[1:] if stem[0] == "k" and stem[1] in VOWELS else stem


def can_contract(word: str) -> bool:
    """Return True if PHON-04 gives the form of `word` without its last vowel."""
    return len(word) > 2 and word[-1] == "a" and word[-2] in _WEAKENED and word[-3] in VOWELS + "ŋ"


def contract(word: str) -> str:
    """Return `word` without its last vowel and with the consonant before it weakened (PHON-04).

    Raises ValueError if the record does not give this form.
    """
    if not can_contract(word):
        raise ValueError(f"the contraction of {word!r} is not recorded")
    # A nasal vowel stays nasal, as in šuŋg of šuŋka; only before m is it spelled plain, as in nom of noŋpa.
    rest = word[:-2].removesuffix("ŋ") if word[-2] == "p" else word[:-2]
    return rest + _WEAKENED[word[-2]]
