"""Verbs with an object, derived verbs, and particles: facts, sides, and forms that are not asked."""

from functools import cache, partial

from dakota1890.draws import Draws
from dakota1890.families import FAMILIES
from dakota1890.families.objects import OBJECTS
from dakota1890.families.particles import PARTICLES
from dakota1890.splits import side_of


@cache
def recorded(family):
    return FAMILIES[family].recorded()


def question_of(family, lemma, form):
    """Return the only question of a family about the verb `lemma` for `form`."""
    (found,) = (
        q
        for q in recorded(family)
        if q.ask.startswith(f'Dakota verb "{lemma}" ') and q.ask.endswith(f" Form: {form}.")
    )
    return found


object_question, particle_question = partial(question_of, "objects"), partial(question_of, "particles")


def test_a_form_carries_the_facts_and_cells_of_its_parts():
    question = object_question("manoŋ", "I (subject), them (object), future")
    assert set(question.facts) >= {"manoŋ/I/1sg", "manoŋ/I/1sg>3pl"}
    assert set(question.cells) >= {"1sg|I, inside", "1sg>3pl|I, inside", "kta|I, final a keeps"}
    assert set(question.rule_ids) >= {"VERB-02", "VERB-15", "VERB-16", "VERB-20"}


def test_a_derived_word_of_the_lexicon_shares_its_fact_with_the_dictionary():
    question = object_question("kaġa", "thou, dative (to somebody)")
    assert question.facts == ("kićaġa/ki/2sg",)
    assert object_question("kaġa", "he, dative (to somebody)").facts == ("kićaġa/gloss",)
    assert set(question.lemma_ids) == {"kaġa", "kićaġa"}
    assert "2sg|ki" in question.cells


def test_pairs_that_are_spelled_alike_share_their_fact():
    """uŋkutepi is we shoot and he shoots us; nikutepi is they shoot thee and he shoots you all."""
    assert object_question("kute", "he (subject), us (object)").facts == ("kute/I/1pl",)
    thee, you_all = (
        object_question("kute", "they (subject), thee (object)"),
        object_question("kute", "he (subject), you all (object)"),
    )
    assert thee.accept == you_all.accept == ("nikutepi",)
    assert thee.facts == you_all.facts


def test_i_and_thee_and_the_reflexive_are_held_out_as_rules():
    for question in OBJECTS.recorded():
        if "PHON-07" in question.rule_ids or "VERB-29" in question.rule_ids:
            assert side_of(question) == "rule"
    assert side_of(object_question("kute", "I (subject), thee (object)")) == "rule"
    assert "kute/I/1sg" not in object_question("kute", "I (subject), thee (object)").facts


def test_invented_verbs_take_every_kind_that_is_trained():
    made = [OBJECTS.invent(Draws(0, index)) for index in range(600)]
    assert all(question.invented for question in made)
    asked = {question.ask.partition("Form: ")[2] for question in made}
    for kind in ("(object)", "dative", "benefactive", "possessive", "absolute", "causative in -ya"):
        assert any(kind in form for form in asked), kind
    assert not any("reflexive" in form for form in asked)
    assert {question.depth for question in made} == {1, 2, 3}
    assert sum(side_of(question) == "train" for question in made) > 400


def test_unrecorded_verb_forms_are_not_asked():
    asks = [question.ask for question in PARTICLES.recorded()]
    # The effect of nuŋ and s'a on a final a, kiŋ after a final e, commands to be in a state.
    for lemma, form in (
        ("yuha", "I, doubtful future"),
        ("yuha", "he, habitual"),
        ("kaġa", "I, future"),
        ("kute", "thou, prohibition (do not)"),
        ("wašte", "command, a man speaking to one person"),
        ("wašte", "thou, prohibition (do not)"),
    ):
        assert not any(f'verb "{lemma}"' in q and q.endswith(f" Form: {form}.") for q in asks)


def test_purpose_needs_the_facts_of_the_motion_verb():
    question = particle_question("waŋyaka", 'I, "ya" in order to do "waŋyaka", future')
    assert set(question.facts) >= {"ya/II/1sg", "ya/II/1sg/kta", "waŋyaka/contracted"}
    assert set(question.lemma_ids) == {"waŋyaka", "ya"}
    assert set(question.rule_ids) >= {"PHON-04", "SYN-05", "VERB-20"}
    assert question.depth == 3


def test_prohibition_and_habit_are_held_out_as_rules():
    assert side_of(particle_question("manoŋ", "thou, prohibition (do not)")) == "rule"
    assert side_of(particle_question("wamanoŋ", "he, habitual")) == "rule"


def test_invented_particles_combine_only_with_trained_facts():
    made = [PARTICLES.invent(Draws(0, index)) for index in range(600)]
    purposes = [question for question in made if "in order to" in question.ask]
    assert purposes
    assert all(question.invented for question in made)
    assert all(side_of(particle_question(q.lemma_ids[1], _plain(q))) == "train" for q in purposes)


def _plain(question):
    """Return `I, future` of `I, "ya" in order to do "...", future`."""
    form = question.ask.rpartition("Form: ")[2].removesuffix(".")
    return f"{form.partition(', ')[0]}, {form.rpartition(', ')[2]}"
