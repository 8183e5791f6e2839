"""What stands around the verb: hand-written forms for every kind, and what is not asked."""

from dakota1890.draws import Draws
from dakota1890.families.particles import PARTICLES
from dakota1890.splits import side_of

RECORDED = {question.ask: question for question in PARTICLES.recorded()}


def question_of(lemma, form):
    """The one question about the verb `lemma` for `form`."""
    (found,) = (
        q
        for text, q in RECORDED.items()
        if text.startswith(f'Dakota verb "{lemma}" ') and text.endswith(f" Form: {form}.")
    )
    return found


def test_what_the_record_does_not_say_is_not_asked():
    asks = "\n".join(RECORDED)
    # What nuŋ and s'a do to a final a, what kiŋ is after a final e, commands to be in a state.
    for lemma, form in (
        ("yuha", "I, doubtful future"),
        ("yuha", "he, habitual"),
        ("kaġa", "I, future"),
        ("kute", "thou, prohibition (do not)"),
        ("wašte", "command, a man speaking to one person"),
        ("wašte", "thou, prohibition (do not)"),
    ):
        assert not any(f'verb "{lemma}"' in q and q.endswith(f" Form: {form}.") for q in asks.split("\n"))


def test_purpose_needs_the_facts_of_the_motion_verb():
    question = question_of("waŋyaka", 'I, "ya" in order to do "waŋyaka", future')
    assert set(question.facts) >= {"ya/II/1sg", "ya/II/1sg/kta", "waŋyaka/contracted"}
    assert set(question.lemma_ids) == {"waŋyaka", "ya"}
    assert set(question.rule_ids) >= {"PHON-04", "SYN-05", "VERB-20"}
    assert question.depth == 3


def test_prohibition_and_habit_are_held_out_as_rules():
    assert side_of(question_of("manoŋ", "thou, prohibition (do not)")) == "rule"
    assert side_of(question_of("wamanoŋ", "he, habitual")) == "rule"


def test_invented_verbs_stand_only_beside_trained_facts():
    made = [PARTICLES.invent(Draws(0, index)) for index in range(600)]
    purposes = [question for question in made if "in order to" in question.ask]
    assert purposes
    assert all(question.invented for question in made)
    assert all(side_of(question_of(q.lemma_ids[1], _plain(q))) == "train" for q in purposes)


def _plain(question):
    """`I, future` of `I, "ya" in order to do "...", future`."""
    form = question.ask.rpartition("Form: ")[2].removesuffix(".")
    return f"{form.partition(', ')[0]}, {form.rpartition(', ')[2]}"
