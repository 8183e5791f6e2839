"""Verbs with an object and verbs made of verbs: hand-written forms, and what is not asked."""

from dakota1890.draws import Draws
from dakota1890.families.objects import OBJECTS
from dakota1890.splits import side_of

RECORDED = {question.ask: question for question in OBJECTS.recorded()}


def question_of(lemma, form):
    """The one question about the verb `lemma` for `form`."""
    (found,) = (
        q for text, q in RECORDED.items() if f'verb "{lemma}"' in text and text.endswith(f". Form: {form}.")
    )
    return found


def test_a_form_carries_the_facts_and_cells_of_its_parts():
    question = question_of("manoŋ", "I (subject), them (object), future")
    assert set(question.facts) >= {"manoŋ/I/1sg", "manoŋ/I/1sg>3pl"}
    assert set(question.cells) >= {"1sg|I, inside", "1sg>3pl|I, inside", "kta|I, final a keeps"}
    assert set(question.rule_ids) >= {"VERB-02", "VERB-15", "VERB-16", "VERB-20"}


def test_a_derived_word_of_the_lexicon_shares_its_fact_with_the_dictionary():
    question = question_of("kaġa", "thou, dative (to somebody)")
    assert question.facts == ("kićaġa/ki/2sg",)
    assert question_of("kaġa", "he, dative (to somebody)").facts == ("kićaġa/gloss",)
    assert set(question.lemma_ids) == {"kaġa", "kićaġa"}
    assert "2sg|ki" in question.cells


def test_pairs_that_are_spelled_alike_share_their_fact():
    """uŋkutepi is we shoot and he shoots us; nikutepi is they shoot thee and he shoots you all."""
    assert question_of("kute", "he (subject), us (object)").facts == ("kute/I/1pl",)
    thee, you_all = (
        question_of("kute", "they (subject), thee (object)"),
        question_of("kute", "he (subject), you all (object)"),
    )
    assert thee.accept == you_all.accept == ("nikutepi",)
    assert thee.facts == you_all.facts


def test_i_and_thee_and_the_reflexive_are_held_out_as_rules():
    for question in RECORDED.values():
        if "PHON-07" in question.rule_ids or "VERB-29" in question.rule_ids:
            assert side_of(question) == "rule"
    assert side_of(question_of("kute", "I (subject), thee (object)")) == "rule"
    assert "kute/I/1sg" not in question_of("kute", "I (subject), thee (object)").facts


def test_invented_verbs_take_every_kind_that_is_trained():
    made = [OBJECTS.invent(Draws(0, index)) for index in range(600)]
    assert all(question.invented for question in made)
    asked = {question.ask.partition("Form: ")[2] for question in made}
    for kind in ("(object)", "dative", "benefactive", "possessive", "absolute", "causative in -ya"):
        assert any(kind in form for form in asked), kind
    assert not any("reflexive" in form for form in asked)
    assert {question.depth for question in made} == {1, 2, 3}
    assert sum(side_of(question) == "train" for question in made) > 400
