"""Questions compared with answers written by hand from the record; questions of kin and possession."""

import csv
from functools import cache
from pathlib import Path

import pytest

from dakota1890.corpus import load_corpus
from dakota1890.draws import Draws
from dakota1890.families import FAMILIES, numerals
from dakota1890.families.kin import KIN
from dakota1890.families.possess import POSSESS
from dakota1890.splits import side_of

with (Path(__file__).parent / "answers.csv").open(encoding="utf-8", newline="") as table:
    ANSWERS = list(csv.DictReader(table))

KIN_ANSWERS = {question.ask: question for question in KIN.recorded()}
OWNED = {question.ask: question for question in POSSESS.recorded()}


@cache
def questions():
    """Return the questions by (family, ask)."""
    of_numbers = [
        numerals.write(2536),
        numerals.read(24, "iyamni topa"),
        numerals.add(30, 4),
        numerals.multiply(2, 2),
        numerals.in_succession(4),
        *map(numerals.place, (23, 20, 2)),
        *map(numerals.piece, (3, 4)),
        *map(numerals.restricted, (5, 3)),
        *map(numerals.by_so_many, (7, 100)),
    ]
    recorded = {name: family.recorded() for name, family in FAMILIES.items() if family.recorded}
    recorded["numerals"] = of_numbers
    return {(name, question.ask): question for name, found in recorded.items() for question in found}


@pytest.mark.parametrize("row", ANSWERS, ids=lambda row: f"{row['family']}-{row['ask'][-40:]}")
def test_questions_and_their_answers(row):
    question = questions()[row["family"], row["ask"]]
    assert set(question.accept) == set(row["accept"].split("; "))
    assert not row["depth"] or question.depth == int(row["depth"])


def test_every_recorded_kin_form_is_an_answer():
    answers = {form for question in KIN_ANSWERS.values() for form in question.accept}
    assert {form for kin in load_corpus().kin for _, form in kin.attested} <= answers


def test_irregular_kin_forms_are_not_asked():
    answers = {form for question in KIN_ANSWERS.values() for form in question.accept}
    shown = " ".join(KIN_ANSWERS)
    for form in ("atkuku", "huŋku", "ćiŋću", "tawiću", "ćiŋhiŋtku"):
        assert not any(form in answer for answer in answers), form
        assert form not in shown, form
    assert not {"ateku", "inaku", "ćiŋyeku", "ćiŋkšitku"} & answers


def test_a_name_has_relatives_of_its_sex_only():
    assert any("Winona's elder brother" in ask and "timdo" in ask for ask in KIN_ANSWERS)
    assert not any("Winona's elder sister" in ask and "taŋke" in ask for ask in KIN_ANSWERS)


def test_names_of_owners_are_only_evaluated():
    owned = [question for question in KIN_ANSWERS.values() if "POSS-10" in question.rule_ids]
    assert len({question.accept for question in owned}) >= 60
    assert {side_of(question) for question in owned} == {"rule"}


def test_axe_is_an_exception_and_kin_a_separate_family():
    lemmas = {lemma for question in OWNED.values() for lemma in question.lemma_ids}
    assert not {"oŋšpe", "suŋka", "dekši", "ate"} & lemmas


def test_invented_owners_and_things():
    owned = [q for q in (POSSESS.invent(Draws(4, i)) for i in range(400)) if q.rule_ids == ("POSS-09",)]
    assert owned
    for question in owned:
        owner, thing = question.lemma_ids
        assert question.accept[0] in (f"{owner} {thing} tawa", f"{owner} {thing} tawapi")
