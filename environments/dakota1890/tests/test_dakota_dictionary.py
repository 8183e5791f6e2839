"""Words and glosses, against entries of the record."""

from functools import cache

import pytest

from dakota1890.families.dictionary import DICTIONARY
from dakota1890.orthography import canonical
from dakota1890.splits import side_of


@cache
def questions():
    return {question.ask: question for question in DICTIONARY.recorded()}


@pytest.mark.parametrize(
    ("ask", "accept"),
    [
        ('Give the Dakota word for "man" (noun).', {"wićašta"}),
        ('Give the Dakota word for "to remember" (verb).', {"kiksuya"}),
        (
            'Give the English meaning of the Dakota verb "kaška".',
            {"to bind", "bind", "to tie", "tie", "to bind, tie"},
        ),
        (
            'Give the English meaning of the Dakota noun "šuŋktaŋka".',
            {"horse", "a horse", "the horse"},
        ),
        ('Give the English meaning of the Dakota postposition "opta".', {"through"}),
        (
            'Give the English meaning of the Dakota adjective "taŋka".',
            {"great", "large", "great, large"},
        ),
    ],
)
def test_both_directions(ask, accept):
    assert set(questions()[ask].accept) == accept


def test_both_directions_stand_on_one_side():
    by_facts = {}
    for question in questions().values():
        assert all(canonical(answer) == answer for answer in question.accept)
        by_facts.setdefault((question.facts, question.lemma_ids), set()).add(side_of(question))
    assert all(len(sides) == 1 for sides in by_facts.values())
    assert len(questions()) > 1.5 * len(by_facts)


def test_no_gloss_with_brackets_or_name_is_asked_back():
    back = [question for ask, question in questions().items() if "English meaning" in ask]
    assert len(back) > 150
    for question in back:
        assert not any(set("()!?") & set(answer) for answer in question.accept), question.accept
        assert question.answer == "meaning"
        assert question.prompt_forms == question.lemma_ids


def test_what_only_the_exceptions_ask_is_left_out():
    shown = {lemma for question in questions().values() for lemma in question.lemma_ids}
    assert not {"atkuku", "ćiŋću", "tawiću", "tokaheya", "maŋka", "hećanoŋ"} & shown
