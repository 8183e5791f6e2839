"""Kinds of number questions compared with forms written by hand from the record."""

from functools import cache

import pytest

from dakota1890.draws import Draws
from dakota1890.families import numerals
from dakota1890.morphology.numerals import numeral, ordinal
from dakota1890.questions import NUMBER
from dakota1890.splits import is_held_out_fact, is_in_train_range, side_of


@cache
def drawn():
    return [numerals.NUMERALS.draw(Draws(3, index)) for index in range(8_000)]


@cache
def in_training():
    return [question for question in drawn() if side_of(question) == "train"]


@pytest.mark.parametrize("number", [1, 11, 12, 19, 21, 31, 100, 101, 119, 200, 10_002])
def test_ordinals_that_the_record_does_not_give_are_refused(number):
    with pytest.raises(ValueError, match="not recorded"):
        ordinal(number)


def test_every_kind_is_drawn_and_nineteen_never_is():
    kinds = {question.ask.split()[0] + question.ask.split()[1] for question in in_training()}
    assert {"Writethe", "Whichnumber", "Addthe", 'Write"only'} <= kinds
    read = [question for question in drawn() if question.ask.startswith("Which")]
    assert all(question.answer == NUMBER and question.accept[0].isdecimal() for question in read)
    numbers = {int(lemma) for question in drawn() for lemma in question.lemma_ids}
    assert not {number for number in numbers if number % 100 == 19}
    assert max(numbers) <= 9_999


def test_all_directions_share_the_facts_of_their_numbers():
    assert numerals.read(47, "wikćemna topa saŋpa šakowiŋ").facts == numerals.write(47).facts
    assert numerals.add(5, 42).facts == ("number/5", "number/42", "number/47")
    assert set(numerals.piece(47).facts) > set(numerals.place(47).facts) > set(numerals.write(47).facts)


def test_a_round_sum_of_large_numbers_is_beyond_training():
    assert side_of(numerals.add(1328, 2672)) == "range"
    assert side_of(numerals.write(4000)) != "range"
    for question in in_training():
        assert all(is_in_train_range(int(lemma)) for lemma in question.lemma_ids), question


def test_the_words_of_a_held_out_number_are_nowhere_in_training():
    """A held-out sum may have a trained total, but a trained question shows no held-out number."""
    numbers = [n for n in range(1, 10_000) if is_held_out_fact(numerals.fact(n)) or not is_in_train_range(n)]
    held = {form for n in numbers for form in numeral(n)}
    assert len([n for n in numbers if n < 100]) >= 5
    for question in in_training():
        assert not held & {*question.accept, *question.prompt_forms}, question


def test_a_sum_is_never_its_words_joined():
    for question in drawn():
        if question.ask.startswith("Add"):
            one, other = question.prompt_forms
            joined = {f"{one} {other}", f"{other} {one}", f"{one} saŋpa {other}", f"{other} saŋpa {one}"}
            assert not joined & set(question.accept), question


def test_training_is_more_than_a_handful_of_numbers():
    asked = [question.ask for question in in_training()]
    assert len(set(asked)) > 0.25 * len(asked)
    assert max(asked.count(ask) for ask in asked[:200]) < 0.01 * len(asked)
