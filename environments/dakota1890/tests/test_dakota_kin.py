"""Kin questions against forms written down by hand from the record."""

import pytest

from dakota1890.corpus import load_corpus
from dakota1890.families.kin import KIN
from dakota1890.splits import side_of

ANSWERS = {question.ask: question for question in KIN.recorded()}


@pytest.mark.parametrize(
    ("ask", "accept"),
    [
        ("What does a man call his elder brother? Give the Dakota word.", {"ćiŋye"}),
        ("What does a woman call her elder brother? Give the Dakota word.", {"timdo"}),
        ("What does a woman call her sister-in-law? Give the Dakota word.", {"ićepaŋ"}),
        ("What does a woman call her younger brother? Give the Dakota word.", {"suŋka"}),
        ("What is a third child named in Dakota, if it is a girl?", {"hapistinna"}),
        ("What is a first child named in Dakota, if it is a boy?", {"ćaske"}),
        ('Dakota kin term "dekši" (uncle). Form: thy uncle.', {"nidekši"}),
        ('Dakota kin term "dekši" (uncle). Form: his or her uncle.', {"dekšitku"}),
        ('Dakota kin term "taŋka" (a woman\'s younger sister). Form: her younger sister.', {"taŋkaku"}),
        ('Dakota kin term "taŋkši" (a man\'s younger sister). Form: his younger sister.', {"taŋkšitku"}),
        ('Dakota kin term "hihna" (a woman\'s husband). Form: her husband.', {"hihnaku"}),
        (
            'Dakota kin term "haŋkaši" (a man\'s female cousin). Form: his female cousin.',
            {"haŋkašitku", "haŋkašiću"},
        ),
        (
            'Dakota kin term "suŋka" (younger brother), with owner "suŋkaku". '
            "Form: somebody's younger brother, anyone's.",
            {"wićasuŋkaku"},
        ),
        (
            'Dakota kin term "suŋka" (younger brother) and the name "hepi". Say: Hepi\'s younger brother.',
            {"hepi suŋkaku"},
        ),
        ('Dakota kin term "ate" (father). Form the verb "to have as father" for: I.', {"atewaya"}),
        ('Dakota kin term "ate" (father). Form the verb "to have as father" for: you all.', {"ateyayapi"}),
    ],
)
def test_questions_and_their_answers(ask, accept):
    assert set(ANSWERS[ask].accept) == accept


def test_every_recorded_form_is_an_answer():
    answers = {form for question in ANSWERS.values() for form in question.accept}
    for kin in load_corpus().kin:
        for _, form in kin.attested:
            assert form in answers, form


def test_irregular_forms_are_not_asked():
    answers = {form for question in ANSWERS.values() for form in question.accept}
    shown = " ".join(ANSWERS)
    for form in ("atkuku", "huŋku", "ćiŋću", "tawiću", "ćiŋhiŋtku"):
        assert not any(form in answer for answer in answers), form
        assert form not in shown, form
    assert not {"ateku", "inaku", "ćiŋyeku", "ćiŋkšitku"} & answers


def test_a_name_has_relatives_of_its_sex_only():
    assert any("Winona's elder brother" in ask and "timdo" in ask for ask in ANSWERS)
    assert not any("Winona's elder sister" in ask and "taŋke" in ask for ask in ANSWERS)


def test_names_of_owners_are_only_evaluated():
    owned = [question for question in ANSWERS.values() if "POSS-10" in question.rule_ids]
    assert len({question.accept for question in owned}) >= 60
    assert {side_of(question) for question in owned} == {"rule"}
