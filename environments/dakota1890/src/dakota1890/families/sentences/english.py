"""English clauses that distinguish thou and you all."""

from __future__ import annotations

from collections.abc import Sequence

_NOT = {"negative", "negative question"}
_QUESTIONS = {"question", "negative question"}


def clause(subject: str, person: str, verb: Sequence[str], mode: str, rest: str) -> str:
    """Return a clause; `verb` holds the plain, the he- and the thou-form: steal, steals, stealest."""
    if mode == "plain":
        return _joined(subject, verb[{"3sg": 1, "2sg": 2}.get(person, 0)], rest)
    if mode == "future":
        return _joined(subject, "wilt" if person == "2sg" else "will", verb[0], rest)
    helper = {"2sg": "dost", "3sg": "does"}.get(person, "do")
    return _with_helper(subject, helper, _joined(verb[0], rest), mode)


def quality_clause(subject: str, *, plural: bool, quality: str, mode: str) -> str:
    """Return a clause that a subject is `quality`."""
    if mode == "future":
        return _joined(subject, "will be", quality)
    return _with_helper(subject, "are" if plural else "is", quality, mode)


def _with_helper(subject: str, helper: str, rest: str, mode: str) -> str:
    negation = "not" if mode in _NOT else ""
    if mode in _QUESTIONS:
        return _joined(helper, subject, negation, rest)
    return _joined(subject, helper, negation, rest)


def sentence(words: str, mode: str) -> str:
    """Return the words as a sentence, with a capital and a final mark."""
    mark = "?" if mode in _QUESTIONS else "."
    return words[0].upper() + words[1:] + mark


def _joined(*words: str) -> str:
    return " ".join(word for word in words if word)
