"""Replies whose reward is known: correct answers in every spelling, and all known tricks."""

from __future__ import annotations

import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from dakota1890.grading import DIACRITIC_REWARD
from dakota1890.orthography import strip_diacritics
from dakota1890.questions import NUMBER
from dakota1890.tasks import Item

TASKS_PER_FAMILY = 4
AFFIXES = "wa ya uŋ ma ni pi mi mita nita ta ku tku wića ći kta šni"
_CYRILLIC = {"a": "а", "e": "е", "o": "о", "i": "і", "p": "р", "c": "с"}
_OLDER_LETTERS = {"š": "ś", "ž": "ź", "ġ": "ǧ", "ŋ": "ṅ", "ć": "č", "ḣ": "ȟ"}
_STRESSED = {"a": "á", "e": "é", "i": "í", "o": "ó", "u": "ú"}


class Probe(NamedTuple):
    """Probe that checks that `reply` to `item` has exactly the reward `reward`."""

    name: str
    item: Item
    reply: str
    reward: float


def probes(held_out: Sequence[Item]) -> list[Probe]:
    """Return every probe for the first tasks of each family; `held_out` are tasks without shaping."""
    by_family: dict[str, list[Item]] = defaultdict(list)
    for item in held_out:
        by_family[item.data["family"]].append(item)
    return [
        Probe(name, item, reply, reward)
        for items in by_family.values()
        for item in items[:TASKS_PER_FAMILY]
        for name, reply, reward in (*_right(item), *_nearly_right(item), *_worthless(item))
    ]


def tagged(answer: str) -> str:
    """Return `answer` in the tag that the environment reads."""
    return f"<answer>{answer}</answer>"


def _right(item: Item) -> Iterator[tuple[str, str, float]]:
    answer = item.data["accept"][0]
    spellings: dict[str, Callable[[str], str]] = {
        "right": str,
        "right, decomposed": lambda text: unicodedata.normalize("NFD", text),
        "right, composed": lambda text: unicodedata.normalize("NFC", text),
        "right, surrounded by space": lambda text: f"\n  {text} \n",
    }
    if item.data["answer"] != NUMBER:
        spellings |= {
            "right, older letters": lambda text: _replaced(text, _OLDER_LETTERS),
            "right, first vowel stressed": lambda text: _replaced(text, _STRESSED, once=True),
            "right, capitals": str.upper,
            "right, zero-width character": lambda text: f"{text[:1]}\u200b{text[1:]}",
            "right, full stop": lambda text: f"{text}.",
        }
    for name, spell in spellings.items():
        yield name, tagged(spell(answer)), 1.0
    yield "right after 2,000 words", "word " * 2_000 + tagged(answer), 1.0
    yield "right after thinking of another", f"<think>{tagged('kta')}</think>{tagged(answer)}", 1.0


def _nearly_right(item: Item) -> Iterator[tuple[str, str, float]]:
    answer = item.data["accept"][0]
    plain = strip_diacritics(answer)
    if plain != answer and not _accepts(item.data, plain) and plain not in item.data["prompt_forms"]:
        yield "all marks lost", tagged(plain), DIACRITIC_REWARD


def _worthless(item: Item) -> Iterator[tuple[str, str, float]]:
    answer = item.data["accept"][0]
    replies = {
        "empty": "",
        "white space": tagged(" \t\n"),
        "nothing in the tag": tagged(""),
        "no tag": answer,
        "unclosed tag": f"<answer>{answer}",
        "closed before opened": f"</answer>{answer}<answer>",
        "nested tags": tagged(tagged(answer)),
        "two tags": tagged(answer) + tagged(answer),
        "right in the reasoning only": f"It is {answer}. {tagged('kta')}",
        "prompt echoed": tagged(item.prompt),
        "all affixes": tagged(AFFIXES),
        "affixes run together": tagged(AFFIXES.replace(" ", "")),
        "bag of letters": tagged("aeotnsrihedoltuwf"),
        "several, comma": tagged(f"{answer}, {answer}"),
        "several, or": tagged(f"{answer} or {answer}"),
        "several, slash": tagged(f"{answer}/{answer}"),
        "several, lines": tagged(f"{answer}\n{answer}"),
        "right and junk": tagged(f"{answer} zzz"),
        "junk and right": tagged(f"zzz {answer}"),
        "4,000 characters": tagged((answer + " ") * (4_000 // len(answer) + 1)),
        "markup": tagged(f"<b>{answer}</b>"),
        "anagram": tagged(answer[::-1]),
        "homoglyphs": tagged(_replaced(answer, _CYRILLIC)),
        **{f"echo of {form}": tagged(form) for form in item.data["prompt_forms"]},
    }
    for name, reply in replies.items():
        if not _accepts(item.data, reply.removeprefix("<answer>").removesuffix("</answer>")):
            yield name, reply, 0.0


def _accepts(data: Mapping[str, Any], answer: str) -> bool:
    """Return True if a trick gives an accepted answer, such as a palindrome or a word without marks."""
    return answer.strip() in data["accept"]


def _replaced(text: str, letters: Mapping[str, str], *, once: bool = False) -> str:
    changed = []
    for char in text:
        new = letters.get(char, char)
        changed.append(new)
        if once and new != char:
            return "".join(changed) + text[len(changed) :]
    return "".join(changed)
