"""Numbers as Dakota words."""

from __future__ import annotations

UNITS = (
    "waŋžidaŋ",
    "noŋpa",
    "yamni",
    "topa",
    "zaptaŋ",
    "šakpe",
    "šakowiŋ",
    "šahdoġaŋ",
    "napćiŋwaŋka",
)
_SHORT_ONE = "waŋži"
# NUM-04 has a second way of counting, "four of the third ten"; only these two are attested.
_OF_THE_NEXT_TEN = {24: "iyamni topa", 33: "itopa yamni"}
DISTRIBUTIVES = {3: "yamnimni", 5: "zaptaŋptaŋ", 7: "šakowiŋwiŋ", 100: "opawiŋġeŋġe"}
"""Recorded distributives that double the last syllable (NUM-07); other numbers double another one."""

RESTRICTED = (3, 5, 6, 7, 8, 9, 10, 100, 1_000)
"""Numbers whose "only" is the plain numeral with -na (NUM-08); noŋpa, and so perhaps topa, is contracted."""

ORDINAL_TAILS = (*range(2, 11), *(n for n in range(20, 100) if n % 10 != 1))
"""Last two digits of the ordinals that the record licenses.

The first, eleventh to nineteenth and twenty-first are irregular or not recorded, nor is the form of i- before
opawiŋġe.
"""


def numeral(number: int) -> tuple[str, ...]:
    """Return every licensed spelling of 1 to 9,999 (NUM-01 to NUM-05), the preferred one first."""
    if not 1 <= number <= 9_999:
        raise ValueError(f"{number} is outside 1 to 9,999")
    forms = list(_cardinal(number))
    forms += [_OF_THE_NEXT_TEN[number]] if number in _OF_THE_NEXT_TEN else []
    return tuple(dict.fromkeys(forms))


def _cardinal(number: int) -> list[str]:
    if number < 10:
        return [UNITS[number - 1]] + ([_SHORT_ONE] if number == 1 else [])
    if number < 100:
        return _below_hundred(number)
    word, size = ("opawiŋġe", 100) if number < 1_000 else ("kektopawiŋġe", 1_000)
    count, rest = divmod(number, size)
    head = word if count == 1 else f"{word} {UNITS[count - 1]}"
    return [head] if rest == 0 else [f"{head} saŋpa {tail}" for tail in _cardinal(rest)]


def _below_hundred(number: int) -> list[str]:
    tens, unit = divmod(number, 10)
    head = "wikćemna" if tens == 1 else f"wikćemna {UNITS[tens - 1]}"
    if unit == 0:
        return [head]
    if number == 19:  # NUM-02: the other nine
        return ["uŋma napćiŋwaŋka"]
    units = _cardinal(unit)
    if tens == 1:
        forms = [f"ake {word}" for word in units] + [f"wikćemna saŋpa {word}" for word in units]
        return forms + [f"ake{word}" for word in units]
    return [f"{head} {link} {word}" for link in ("saŋpa", "ake") for word in units]


def ordinal(number: int) -> tuple[str, ...]:
    """Return the ordinal of `number` (NUM-06): i- on the last member.

    Raises ValueError if the record does not give it, as `ORDINAL_TAILS` lists.
    """
    if number % 100 not in ORDINAL_TAILS or number > 9_999:
        raise ValueError(f"the ordinal of {number} is not recorded")
    tail = number % 100
    head = f"{_cardinal(number - tail)[0]} saŋpa " if number > 100 else ""
    if tail <= 10 or tail % 10 == 0:
        return (f"{head}i{_cardinal(tail)[0]}",)
    links = [form.rpartition(" ") for form in _below_hundred(tail)]
    return tuple(f"{head}{before} i{unit}" for before, _, unit in links)


def times(number: int) -> tuple[str, ...]:
    """Return `number` times in succession (NUM-10)."""
    return tuple(f"{form} akihde" for form in numeral(number))


def fraction(number: int) -> tuple[str, ...]:
    """Return one of `number` equal parts: oŋḣpa, a piece, before the ordinal (NUM-09)."""
    return tuple(f"oŋḣpa {form}" for form in ordinal(number))


def only(number: int) -> str:
    """Return only `number` (NUM-08), which is one of RESTRICTED."""
    return f"{_cardinal(number)[0]}na"
