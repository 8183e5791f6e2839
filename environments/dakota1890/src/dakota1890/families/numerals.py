"""Questions about numbers: write them, read them, count with them.

The number nineteen, and every number that ends in it, is an exception and not asked here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from dakota1890.draws import Draws
from dakota1890.morphology.numerals import (
    DISTRIBUTIVES,
    ORDINAL_TAILS,
    RESTRICTED,
    UNITS,
    fraction,
    numeral,
    only,
    ordinal,
    times,
)
from dakota1890.questions import NUMBER, WORDS, Family, Question, unique
from dakota1890.splits import is_held_out_fact, is_in_train_range

_BEYOND = 25
"""Percentage of draws beyond the numbers of training."""

_OTHER_UNIT = dict(zip(UNITS, (*UNITS[4:], *UNITS[:4]), strict=True))
_RULE = "thousands, hundreds, tens, units in this order, each with its count after it, joined by saŋpa"
_READ_RULE = (
    "a count stands after thousands, hundreds and tens; saŋpa joins, ake adds a unit to the ten before"
)
_ORDINAL_RULE = "i- goes before the last member of the number"
_SUFFIXES = {1: "st", 2: "nd", 3: "rd"}


def _draw(draws: Draws) -> Question:
    kind = draws.pick(_DRAWS)
    return kind(draws, draws.below(100) < _BEYOND)


NUMERALS = Family(name="numerals", draw=_draw)


def write(number: int) -> Question:
    """Ask for `number` as Dakota words."""
    return Question(
        family="numerals",
        facts=(fact(number),),
        cells=(f"cardinal|{number_class(number)}",),
        lemma_ids=(str(number),),
        rule_ids=rules(number),
        depth=_parts(number),
        ask=f"Write the number {number} in Dakota words.",
        rule=_RULE,
        answer=WORDS,
        accept=numeral(number),
        # A reply with the right skeleton and every count wrong scores 0: shaping rewards only counts.
        floor_forms=(_skeleton(number),),
        number=number,
    )


def read(number: int, words: str) -> Question:
    """Ask for `number` in digits; `words` is one of its spellings."""
    return replace(
        write(number),
        ask=f'Which number is "{words}" in Dakota? Answer in digits.',
        rule=_READ_RULE,
        answer=NUMBER,
        accept=(str(number),),
        prompt_forms=(words,),
        floor_forms=(words,),
    )


def add(one: int, other: int) -> Question:
    """Ask for the sum of two numbers, which are given and requested as Dakota words."""
    total, shown = one + other, (numeral(one)[0], numeral(other)[0])
    first, second = sorted((number_class(one), number_class(other)))
    return replace(
        write(total),
        facts=unique([fact(one), fact(other), fact(total)]),
        cells=(f"sum with {first}|{second}", f"cardinal|{number_class(total)}"),
        lemma_ids=unique([str(one), str(other), str(total)]),
        rule_ids=unique([*rules(one), *rules(other), *rules(total)]),
        depth=min(4, _parts(total) + 1),
        ask=f'Add the Dakota numbers "{shown[0]}" and "{shown[1]}". Give the sum in Dakota words.',
        prompt_forms=shown,
        floor_forms=(*shown, " ".join(shown), f"{shown[0]} saŋpa {shown[1]}", _skeleton(total)),
        # A round sum of numbers that are not round is also beyond training.
        number=max((one, other, total), key=lambda number: (not is_in_train_range(number), number)),
    )


def multiply(one: int, other: int) -> Question:
    """Ask for the product that completes a multiplication of two units (NUM-11)."""
    product, shown = one * other, f"{numeral(one)[0]} {numeral(other)[0]} hećen"
    return replace(
        write(product),
        facts=unique([fact(one), fact(other), fact(product)]),
        cells=(f"product|{number_class(product)}",),
        lemma_ids=unique([str(one), str(other), str(product)]),
        rule_ids=unique(["NUM-11", *rules(one), *rules(product)]),
        depth=min(4, _parts(product) + 1),
        ask=f'Finish the Dakota multiplication "{shown} ...". Answer with the product in Dakota words.',
        rule=f"a multiplication names both factors, then hećen, then the product; {_RULE}",
        prompt_forms=(shown,),
        floor_forms=(shown, _skeleton(product)),
    )


def in_succession(number: int) -> Question:
    """Ask for `number` times in succession."""
    return write(number).with_added(
        facts=(f"{fact(number)}/times",),
        cells=(f"times|{number_class(number)}",),
        rule_ids=("NUM-10",),
        depth=min(4, _parts(number) + 1),
        ask=f'Write "{number} times in succession" in Dakota words.',
        rule=f"akihde follows the number; {_RULE}",
        accept=times(number),
        floor_forms=(numeral(number)[0], f"{_skeleton(number)} akihde"),
    )


def place(number: int) -> Question:
    """Ask for the ordinal of `number`."""
    return write(number).with_added(
        facts=(f"{fact(number)}/ordinal",),
        cells=(f"ordinal|{number_class(number)}",),
        rule_ids=("NUM-06",),
        ask=f"Write the ordinal {number}{_SUFFIXES.get(number % 10, 'th')} in Dakota words.",
        rule=f"{_ORDINAL_RULE}; {_RULE}",
        accept=ordinal(number),
        floor_forms=(numeral(number)[0], _skeleton(number)),
    )


def piece(number: int) -> Question:
    """Ask for one of `number` equal parts."""
    return place(number).with_added(
        facts=(f"{fact(number)}/fraction",),
        cells=(f"fraction|{number_class(number)}",),
        rule_ids=("NUM-09",),
        depth=min(4, _parts(number) + 1),
        ask=f"Write the fraction 1/{number} in Dakota words.",
        rule=f"oŋḣpa (piece) goes before the ordinal; {_ORDINAL_RULE}",
        accept=fraction(number),
        floor_forms=(numeral(number)[0], ordinal(number)[0], f"oŋḣpa {_skeleton(number)}"),
    )


def restricted(number: int) -> Question:
    """Ask for only `number`."""
    return write(number).with_added(
        facts=(f"{fact(number)}/only",),
        cells=(f"only|{number_class(number)}",),
        rule_ids=("NUM-08",),
        ask=f'Write "only {number}" as one Dakota word, with -na.',
        rule="-na goes at the end of the number",
        accept=(only(number),),
        floor_forms=(numeral(number)[0],),
    )


def by_so_many(number: int) -> Question:
    """Ask for the distributive of `number`."""
    return write(number).with_added(
        facts=(f"{fact(number)}/distributive",),
        cells=(f"distributive|{number_class(number)}",),
        rule_ids=("NUM-07",),
        ask=f'Write "{number} at a time" as one Dakota word.',
        rule="the last syllable of the number is doubled",
        accept=(DISTRIBUTIVES[number],),
        floor_forms=(numeral(number)[0],),
    )


def fact(number: int) -> str:
    """Return the name of the fact that gives the spelling of `number`."""
    return f"number/{number}"


def rules(number: int) -> tuple[str, ...]:
    """Return the rules that writing `number` requires."""
    units = ("NUM-01",) if number <= 10 else ()
    tens = ("NUM-02",) if 11 <= number % 100 <= 19 else ("NUM-03", "NUM-04") if number % 100 > 19 else ()
    return (*units, *tens, *(("NUM-05",) if number >= 100 else ()))


def number_class(number: int) -> str:
    """Return the class of a number by its parts."""
    if number <= 10:
        return "unit"
    if number < 20:
        return "teen"
    if number < 100:
        return "two parts" if number % 10 else "tens"
    return "round" if _parts(number) == 1 else "more"


def _parts(number: int) -> int:
    """Return the number of nonzero digits."""
    return len(str(number)) - str(number).count("0")


def _skeleton(number: int) -> str:
    """Return `number` as Dakota words, with every count replaced by another one."""
    return " ".join(_OTHER_UNIT.get(word, word) for word in numeral(number)[0].split())


def _any_number(draws: Draws, beyond: bool) -> int:
    """Return a number below 100, or of one digit and zeros; with `beyond`, of three or four digits.

    Numbers that end in nineteen are never returned.
    """
    if not beyond and draws.below(8) == 0:
        return draws.pick((100, 1_000)) * (1 + draws.below(9))
    low = draws.pick((100, 1_000)) if beyond else 1
    number = low + draws.below(9 * low if beyond else 99)
    return number + 1 if number % 100 == 19 else number


def _write(draws: Draws, beyond: bool) -> Question:
    return write(_any_number(draws, beyond))


def _read(draws: Draws, beyond: bool) -> Question:
    number = _any_number(draws, beyond)
    return read(number, draws.pick(numeral(number)))


def _add(draws: Draws, beyond: bool) -> Question:
    """Ask for the sum of two numbers whose words do not simply join with saŋpa.

    A total that is held out by chance would be the answer to too many questions of that side.
    """
    while True:
        low, high = draws.pick(((100, 1_000), (1_000, 10_000))) if beyond else (2, 100)
        total = low + draws.below(high - low)
        one = 1 + draws.below(total - 1)
        numbers = (one, total - one, total)
        if any(number % 100 == 19 for number in numbers) or (not beyond and is_held_out_fact(fact(total))):
            continue
        shown = (numeral(one)[0], numeral(total - one)[0])
        if not {f"{shown[0]} saŋpa {shown[1]}", f"{shown[1]} saŋpa {shown[0]}"} & set(numeral(total)):
            return add(one, total - one)


def _multiply(draws: Draws, beyond: bool) -> Question:
    return multiply(*sorted((2 + draws.below(8), 2 + draws.below(8))))


def _times(draws: Draws, beyond: bool) -> Question:
    return in_succession(max(2, _any_number(draws, beyond)))


def _with_ordinal(ask: Callable[[int], Question]) -> Callable[[Draws, bool], Question]:
    def draw(draws: Draws, beyond: bool) -> Question:
        hundreds = 100 * (1 + draws.below(99)) if beyond else 0
        return ask(hundreds + draws.pick(ORDINAL_TAILS))

    return draw


def _small(draws: Draws, beyond: bool) -> Question:
    if draws.below(3) == 0:
        return by_so_many(draws.pick(tuple(DISTRIBUTIVES)))
    return restricted(draws.pick(RESTRICTED))


_DRAWS: Sequence[Callable[[Draws, bool], Question]] = (
    *[_write] * 8,
    *[_read] * 7,
    *[_add] * 10,
    *[_times] * 4,
    *[_with_ordinal(place)] * 4,
    *[_with_ordinal(piece)] * 2,
    *[_multiply] * 2,
    _small,
)
