"""Possession against forms written down by hand from the record."""

import pytest

from dakota1890.draws import Draws
from dakota1890.families.possess import POSSESS

QUESTIONS = {question.ask: question for question in POSSESS.recorded()}


@pytest.mark.parametrize(
    ("ask", "accept"),
    [
        ('Dakota noun "hokšidaŋ" (boy), alienable. Form: my.', {"mitahokšidaŋ"}),
        ('Dakota noun "owiŋža" (bed), alienable. Form: my.', {"mitowiŋže", "mitowiŋža"}),
        ('Dakota noun "wowašte" (goodness), alienable, abstract. Form: my.', {"mitowašte"}),
        ('Dakota noun "naġi" (soul), inalienable. Form: our.', {"uŋnaġipi"}),
        ('Dakota noun "taŋćaŋ" (body), inalienable. Form: your (plural).', {"nitaŋćaŋpi"}),
        ('Dakota noun "oie" (words), inalienable. Form: my.', {"mioie"}),
        ('Give the Dakota word for "mine", standing alone.', {"mitawa"}),
        ('Give the Dakota word for "ours (more than two owners)", standing alone.', {"uŋkitawapi"}),
        (
            'Dakota "tipi" (house) and "wićaštayatapi" (chief). Say: the chief\'s house.',
            {"wićaštayatapi tipi tawa"},
        ),
        ('Dakota "woyute" (food) and "tataŋka" (ox). Say: the ox\'s food.', {"tataŋka woyute tawa"}),
        (
            'Dakota "woyute" (food) and "šuŋktaŋka" (horse). Say: the horses\' food.',
            {"šuŋktaŋka woyute tawapi", "woyute šuŋktaŋka tawapi"},
        ),
        (
            'Dakota "isaŋ" (knife) and "wićašta" (man). Say: the men\'s knife.',
            {"wićašta isaŋ tawapi", "isaŋ wićašta tawapi"},
        ),
    ],
)
def test_questions_and_their_answers(ask, accept):
    assert set(QUESTIONS[ask].accept) == accept


def test_the_axe_is_an_exception_and_kin_is_a_family_of_its_own():
    lemmas = {lemma for question in QUESTIONS.values() for lemma in question.lemma_ids}
    assert not {"oŋšpe", "suŋka", "dekši", "ate"} & lemmas


def test_invented_owners_and_things():
    owned = [q for q in (POSSESS.invent(Draws(4, i)) for i in range(400)) if q.rule_ids == ("POSS-09",)]
    assert owned
    for question in owned:
        owner, thing = question.lemma_ids
        assert question.accept[0] in (f"{owner} {thing} tawa", f"{owner} {thing} tawapi")
