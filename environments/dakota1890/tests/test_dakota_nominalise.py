"""Derived nouns against forms written down by hand from the record."""

import pytest

from dakota1890.corpus import load_corpus
from dakota1890.draws import Draws
from dakota1890.families.nominalise import NOMINALISE
from dakota1890.morphology.derivation import derive
from dakota1890.splits import side_of

QUESTIONS = {question.ask: question for question in NOMINALISE.recorded()}


@pytest.mark.parametrize(
    ("ask", "accept"),
    [
        ('Dakota adjective "wašte" (good). Form: the abstract noun "goodness".', {"wowašte"}),
        (
            'Dakota adjective "ksapa" (wise), final a becomes e. Form: the abstract noun "wisdom".',
            {"woksape"},
        ),
        ('Dakota adjective "šića" (bad). Form: the abstract noun.', {"wošiće", "wošića"}),
        (
            'Dakota verb "apa" (to strike), final a becomes e. Form: the noun of place or result "a stroke".',
            {"oape"},
        ),
        ('Dakota verb "waŋka" (to lie down). Form: the noun of place or result "floor".', {"owaŋka"}),
        (
            'Dakota verb "yawašte" (to bless). '
            'Form: the noun for the one who does it "one who blesses, a blesser".',
            {"wayawašte"},
        ),
        (
            'Dakota verb "yašića" (to speak evil of, curse), final a becomes e. '
            'Form: the noun about human beings "a curser".',
            {"wićayašiće"},
        ),
        (
            'Dakota body part "ćaŋte" (heart). Form: that part of a buffalo or deer '
            "\"a buffalo's or deer's heart\".",
            {"taćaŋte"},
        ),
        ('Dakota body part "ćaŋte" (heart). Form: that part of a fish.', {"hoćaŋte"}),
        ('Dakota noun "wakpa" (river). Form: a little one.', {"wakpadaŋ", "wakpana"}),
        ('Dakota verb "ti" (to dwell). Form: the noun that names the act.', {"tipi"}),
        ('Dakota verb "ećoŋ" (to do). Form: the noun that names the act, with "the".', {"ećoŋpi kiŋ"}),
        (
            'Dakota verbs "mani" (to walk) and "okihi" (to be able), marker after "o". '
            'Say for "I": can do this.',
            {"manipi kiŋ owakihi"},
        ),
    ],
)
def test_questions_and_their_answers(ask, accept):
    assert set(QUESTIONS[ask].accept) == accept


def test_recorded_nouns_are_what_the_rules_make():
    recorded = [noun for noun in load_corpus().derived if noun.attested]
    assert len(recorded) >= 18
    for noun in recorded:
        assert derive(noun) == (noun.attested,), noun


def test_the_noun_shares_the_facts_of_its_gloss_and_of_they():
    wowashte = QUESTIONS['Dakota adjective "wašte" (good). Form: the abstract noun "goodness".']
    assert "wowašte/gloss" in wowashte.facts
    assert wowashte.lemma_ids == ("wašte", "wowašte")
    tipi = QUESTIONS['Dakota verb "ti" (to dwell). Form: the noun that names the act.']
    assert set(tipi.facts) == {"ti/I/3pl", "tipi/gloss"}


def test_what_one_can_do_is_only_evaluated():
    able = [question for question in QUESTIONS.values() if "SYN-06" in question.rule_ids]
    assert len({question.accept for question in able}) >= 100
    assert {side_of(question) for question in able} == {"rule"}


def test_a_verb_whose_plural_is_not_recorded_has_no_noun():
    assert not any('"ya" (to go)' in ask for ask in QUESTIONS)


def test_prompts_differ_and_their_answers_are_not_the_base():
    assert len(QUESTIONS) == len(list(NOMINALISE.recorded()))
    for question in QUESTIONS.values():
        assert not set(question.accept) & set(question.prompt_forms)


def test_invented_bases_end_in_a_only_where_a_rule_says_what_happens():
    for index in range(500):
        question = NOMINALISE.invent(Draws(2, index))
        assert question.invented
        if set(question.rule_ids) & {"NOUN-02", "NOUN-03", "NOUN-04", "NOUN-06"}:
            assert not question.lemma_ids[0].endswith(("a", "aŋ")), question
        if question.rule_ids == ("NOUN-01",) and question.lemma_ids[0].endswith("a"):
            assert len(question.accept) == 2
