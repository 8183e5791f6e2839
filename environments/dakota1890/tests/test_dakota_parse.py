"""Forms taken apart, against analyses written down by hand from the record."""

import json

import pytest

from dakota1890.draws import Draws
from dakota1890.families.conjugate import CONJUGATE
from dakota1890.families.kin import KIN
from dakota1890.families.objects import OBJECTS
from dakota1890.families.parse import PARSE
from dakota1890.families.possess import POSSESS
from dakota1890.grading import grade
from dakota1890.orthography import canonical
from dakota1890.splits import side_of
from dakota1890.tasks import render

QUESTIONS = PARSE.recorded()
BY_FORM = {(question.prompt_forms[0], question.keys): question for question in QUESTIONS}
PERSON, OBJECT = ("lemma", "person", "number"), ("lemma", "subject", "object")
OWNER, RELATIVE = ("lemma", "owner", "number"), ("lemma", "owner")


@pytest.mark.parametrize(
    ("form", "keys", "accept"),
    [
        ("mawanoŋ", PERSON, {"manoŋ 1 singular"}),
        ("mauŋnoŋ", PERSON, {"manoŋ 1 dual"}),
        ("mauŋnoŋpi", PERSON, {"manoŋ 1 plural"}),
        ("duštaŋpi", PERSON, {"yuštaŋ 2 plural"}),
        ("weksuya", PERSON, {"kiksuya 1 singular"}),
        ("imdotaŋka", PERSON, {"iyotaŋka 1 singular"}),
        ("niwaštepi", PERSON, {"wašte 2 plural"}),
        ("ṭapi", PERSON, {"ṭa 3 plural"}),
        ("mayakaška", OBJECT, {"kaška thou me"}),
        ("wićawakaška", OBJECT, {"kaška i them"}),
        ("waŋwićayaka", OBJECT, {"waŋyaka he them"}),
        ("ćićute", OBJECT, {"kute i thee"}),
        ("wićaktepi", OBJECT, {"kte they them"}),
        # One -pi for the plural of either.
        ("niyuzapi", OBJECT, {"yuza he you_all", "yuza they thee", "yuza they you_all"}),
        ("uŋkaġapi", OBJECT, {"kaġa he us", "kaġa they us"}),
        ("mitahokšidaŋ", OWNER, {"hokšidaŋ 1 singular"}),
        ("nitaŋćaŋpi", OWNER, {"taŋćaŋ 2 plural"}),
        ("mitowašte", OWNER, {"wowašte 1 singular"}),
        ("uŋnaġipi", OWNER, {"naġi 1 plural"}),
        ("nisuŋka", RELATIVE, {"suŋka 2"}),
        ("dekšitku", RELATIVE, {"dekši 3"}),
    ],
)
def test_analyses_written_by_hand(form, keys, accept):
    assert set(BY_FORM[form, keys].accept) == accept


def test_a_bare_lemma_is_never_asked_and_a_form_has_one_question_each():
    assert len({question.ask for question in QUESTIONS}) == len(QUESTIONS)
    for question in QUESTIONS:
        (form,) = question.prompt_forms
        lemmas = {answer.split()[0] for answer in question.accept}
        assert form not in lemmas
        assert not any(f'"{lemma}"' in question.ask for lemma in lemmas)
        assert all(len(answer.split()) == len(question.keys) for answer in question.accept)
        assert all(canonical(answer) == answer for answer in question.accept)


def test_the_side_is_that_of_the_form_asked_the_other_way():
    sides = {}
    for family in (CONJUGATE, OBJECTS, POSSESS, KIN):
        for question in family.recorded():
            if len(question.accept[0].split()) == 1 and not question.facts[0].endswith("/gloss"):
                sides.setdefault((question.facts, question.cells), side_of(question))
    matched = [(side_of(q), sides[q.facts, q.cells]) for q in QUESTIONS if (q.facts, q.cells) in sides]
    assert len(matched) > 0.8 * len(QUESTIONS)
    assert all(side == other for side, other in matched)


def test_json_is_graded_by_its_values():
    question = BY_FORM["mauŋnoŋpi", PERSON]
    data = render(question, side_of(question), True).data
    right = {"lemma": "manoŋ", "person": "1", "number": "plural"}
    for answer, reward in (
        (right, 1.0),
        (right | {"person": 1}, 1.0),
        ({key: right[key] for key in ("number", "lemma", "person")}, 1.0),
        (right | {"person": "2"}, 0.0),
        (right | {"lemma": "mauŋnoŋpi"}, 0.0),
        (right | {"tense": "past"}, 0.0),
    ):
        said = f"<answer>{json.dumps(answer, ensure_ascii=False)}</answer>"
        assert grade(said, data, shaping=True).reward == reward, answer


def test_invented_forms_can_be_told_apart():
    drawn = [PARSE.invent(Draws(7, index)) for index in range(2_000)]
    assert {question.keys for question in drawn} == {PERSON, OBJECT, OWNER}
    assert {question.depth for question in drawn} == {1, 2}
    one_meaning = {}
    for question in drawn:
        assert question.invented
        assert "an invented word" in question.ask
        assert one_meaning.setdefault(question.ask, question.accept) == question.accept
        lemma = question.lemma_ids[0]
        assert question.accept[0].split()[0] == lemma
        assert not lemma.endswith("pi")  # which would be a plural
        if question.keys == PERSON and ", class I, marker at the start" in question.ask:
            assert not lemma.startswith(("wa", "ya", "uŋ", "k", "a", "e", "i", "o"))


def test_depths_are_those_of_the_forms():
    assert {question.depth for question in QUESTIONS if question.keys == PERSON} == {1}
    assert BY_FORM["mayakaška", OBJECT].depth == 2
    assert {side_of(question) for question in QUESTIONS} >= {"train", "lemma", "cell", "random"}
