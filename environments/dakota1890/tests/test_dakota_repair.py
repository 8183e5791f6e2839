"""Lost diacritics, against damage done by hand."""

import pytest

from dakota1890.families.repair import REPAIR
from dakota1890.grading import grade
from dakota1890.orthography import bare, canonical
from dakota1890.splits import side_of
from dakota1890.tasks import render

QUESTIONS = REPAIR.recorded()
MARKS = {"ŋ": "n", "š": "s", "ž": "z", "ć": "c", "ġ": "g", "ḣ": "h", "ḳ": "k", "ṭ": "t", "ṗ": "p"}


def repair_of(damaged, meaning):
    (found,) = [q for q in QUESTIONS if f'"{damaged}"' in q.ask and f"Meaning: {meaning}" in q.ask]
    return found


@pytest.mark.parametrize(
    ("damaged", "meaning", "right", "depth"),
    [
        ("hoksidan", "boy (noun)", "hokšidaŋ", 2),
        ("hoksidaŋ", "boy (noun)", "hokšidaŋ", 1),
        ("maga", "field (noun)", "maġa", 1),
        ("cinksi", "son (noun)", "ćiŋkši", 3),
        ("nawahon", "to hear (form: I)", "nawaḣoŋ", 2),
        ("uŋtapi", "to die, be dead (form: we)", "uŋṭapi", 1),
        ("yakaskapi", "to bind, tie (form: you all)", "yakaškapi", 1),
        ("nitamazakan", "thy gun", "nitamazakaŋ", 1),
    ],
)
def test_damage_done_by_hand(damaged, meaning, right, depth):
    question = repair_of(damaged, meaning)
    assert question.accept == (right,)
    assert question.depth == depth


def test_what_is_shown_has_lost_marks_and_nothing_else():
    for question in QUESTIONS:
        (right,), (shown,) = question.accept, question.prompt_forms
        assert canonical(right) == right
        assert shown != right
        assert bare(shown) == bare(right)
        lost = {mark for was, mark in zip(shown, right, strict=True) if was != mark}
        for mark in lost:  # each of its kind is lost, everywhere in the form
            assert mark not in shown
            assert shown.count(MARKS[mark]) == right.count(MARKS[mark]) + right.count(mark)
        assert question.depth == min(len(lost), 3)
        assert {cell.partition(" lost|")[0] for cell in question.cells if " lost|" in cell} == lost
        assert lost != {"ć"}
        assert ("PHON-01" in question.rule_ids) == ("ŋ" in lost)


def test_each_question_has_one_answer_and_marks_are_all_that_counts():
    assert len({question.ask for question in QUESTIONS}) == len(QUESTIONS)
    for question in QUESTIONS[::20]:
        data = render(question, side_of(question), True).data
        assert grade(f"<answer>{question.accept[0]}</answer>", data, shaping=True).reward == 1
        for wrong in (question.prompt_forms[0], bare(question.accept[0])):
            assert grade(f"<answer>{wrong}</answer>", data, shaping=True).reward == 0


def test_every_axis_of_the_base_forms_is_there():
    assert {side_of(question) for question in QUESTIONS} >= {"train", "random", "lemma", "cell"}
    families = {cell.partition("|")[2] for q in QUESTIONS for cell in q.cells if " lost|" in cell}
    assert families == {"dictionary", "conjugate", "possess"}
