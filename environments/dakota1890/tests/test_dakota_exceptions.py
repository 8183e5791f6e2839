"""Exceptions: recorded forms, never the regular ones, and never revealed in training."""

import re

from dakota1890.corpus import load_corpus
from dakota1890.draws import Draws
from dakota1890.families import FAMILIES
from dakota1890.families.exceptions import EXCEPTIONS
from dakota1890.grading import grade
from dakota1890.orthography import canonical, strip_diacritics
from dakota1890.questions import NUMBER
from dakota1890.splits import side_of
from dakota1890.tasks import EVAL_PER_SIDE, render

RECORDED = {question.ask: question for question in EXCEPTIONS.recorded()}
EVIDENCE = re.compile(r"attested|[A-Z]+-\d\d: ")


def test_exceptions_are_only_in_the_evaluation():
    assert 100 <= len(RECORDED) <= EVAL_PER_SIDE
    assert len({q.accept for q in RECORDED.values()}) >= 100
    assert {side_of(q, exception=EXCEPTIONS.exceptions) for q in RECORDED.values()} == {"exception"}
    assert EXCEPTIONS.invent is None


def test_every_exception_is_recorded_or_licensed():
    recorded = {strip_diacritics(canonical(entry.form)) for entry in load_corpus().entries}
    recorded |= {strip_diacritics(word) for form in recorded for word in form.split()}
    for irregular in load_corpus().irregulars:
        assert EVIDENCE.match(irregular.evidence), irregular
        assert set(irregular.rules) <= set(load_corpus().rules)
        if irregular.evidence.startswith("attested"):
            assert all(strip_diacritics(form) in recorded for form in irregular.forms), irregular


def test_regular_form_of_an_exception_scores_zero():
    wrong = 0
    for irregular in load_corpus().irregulars:
        (question,) = (
            q for q in RECORDED.values() if q.facts == (f"{irregular.word}/exception/{irregular.meaning}",)
        )
        item = render(question, "train", True)  # near misses are rewarded there too
        for regular in irregular.regular:
            assert regular not in question.accept
            assert grade(f"<answer>{regular}</answer>", item.data, shaping=True).reward == 0, regular
            wrong += 1
    assert wrong >= 40


def test_no_train_question_asks_for_an_exception_or_shows_one():
    asked = [question for question in EXCEPTIONS.recorded() if question.answer != NUMBER]
    exceptions = {form for question in asked for form in question.accept}
    words = {form for form in exceptions if " " not in form}
    for family in FAMILIES.values():
        questions = family.recorded() if family.recorded else [family.draw(Draws(1, i)) for i in range(3_000)]
        for question in questions:
            if side_of(question, exception=family.exceptions) != "train":
                continue
            shown = {canonical(quoted) for quoted in re.findall('"([^"]+)"', question.ask)}
            assert not exceptions & {*question.accept, *shown}, question
            assert not words & {word for text in (*question.accept, *shown) for word in text.split()}, (
                question
            )
