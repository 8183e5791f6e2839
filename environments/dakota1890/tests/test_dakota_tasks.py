"""Task sequences are reproducible, disjoint where required, and never reveal their answer."""

import json
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from functools import cache
from importlib import resources
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dakota1890.corpus import load_corpus
from dakota1890.draws import Draws
from dakota1890.errors import ArgumentError
from dakota1890.families import FAMILIES
from dakota1890.grading import grade
from dakota1890.orthography import canonical, strip_diacritics
from dakota1890.questions import FORM, WORD, WORDS
from dakota1890.splits import (
    AXES,
    HELD_OUT_CELLS,
    HELD_OUT_RULES,
    is_held_out_fact,
    is_held_out_lemma,
    is_in_train_range,
    side_of,
)
from dakota1890.tasks import (
    DEPTHS,
    EVAL_PER_SIDE,
    TaskOptions,
    TrainTasks,
    draw_question,
    eval_tasks,
    held_out_sample,
    train_depths,
)

NAMES = tuple(FAMILIES)


@cache
def in_training():
    return TrainTasks(TaskOptions(invented_fraction=0.5), 6_000)[:]


@cache
def held_out():
    return eval_tasks(NAMES, DEPTHS, True)


def recorded(side):
    """Yield every recorded question on one side, or for `held` on any side but training."""
    for family in FAMILIES.values():
        questions = family.recorded() if family.recorded else _drawn(family)
        for question in questions:
            found = side_of(question, exception=family.exceptions)
            if found == side or (side == "held" and found != "train"):
                yield question


def _drawn(family):
    return [family.draw(Draws(5, i)) for i in range(3_000)]


def values(questions, name):
    return {value for question in questions for value in getattr(question, name)}


@pytest.fixture(scope="module")
def train_questions():
    return list(recorded("train"))


@pytest.fixture(scope="module")
def held_questions():
    return list(recorded("held"))


def test_train_items_depend_on_options_and_index_alone():
    options = TaskOptions(invented_fraction=0.3, seed=7)
    once, again = TrainTasks(options, 1_000), TrainTasks(options, 50)
    assert [once[i] for i in (49, 3, 17)] == [again[49], again[3], again[17]]
    assert once[-1] == once[999]
    assert once[10:13] == [once[10], once[11], once[12]]
    assert TrainTasks(TaskOptions(seed=8), 50)[:20] != again[:20]
    with pytest.raises(IndexError):
        once[1_000]


@pytest.mark.e2e
def test_recorded_eval_draws_match_a_new_search():
    folder = resources.files("dakota1890") / "data"
    assert json.loads((folder / "held_out_draws.json").read_text("utf-8")) == found_held_out_draws()


def found_held_out_draws():
    """Return the evaluated indices of the first 20,000 draws, by family without recorded questions."""
    found = {}
    for name, family in FAMILIES.items():
        if family.recorded is None:
            drawn = [draw_question(family, index) for index in range(20_000)]
            first = {question.ask: index for index, question in reversed([*enumerate(drawn)])}
            chosen = held_out_sample(family, drawn).values()
            found[name] = sorted(first[question.ask] for questions in chosen for question in questions)
    return found


@pytest.mark.e2e
def test_tasks_are_the_same_in_every_process():
    code = (
        "from dakota1890.tasks import *; from dakota1890.families import FAMILIES;"
        "print(*[t.id for t in TrainTasks(TaskOptions(invented_fraction=0.5), 200)]);"
        "print(*[t.id for t in eval_tasks(tuple(FAMILIES), DEPTHS, True)[:200]])"
    )
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"  # other than this process's seed
    there = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": seed},
    ).stdout
    here = [[task.id for task in tasks[:200]] for tasks in (in_training(), held_out())]
    assert [line.split() for line in there.splitlines()] == here


def test_nothing_held_out_occurs_in_a_train_question(train_questions):
    assert not values(train_questions, "rule_ids") & HELD_OUT_RULES
    assert not values(train_questions, "cells") & HELD_OUT_CELLS
    assert not any(map(is_held_out_fact, values(train_questions, "facts")))
    assert not any(map(is_held_out_lemma, values(train_questions, "lemma_ids")))
    assert all(is_in_train_range(q.number) for q in train_questions if q.number is not None)
    assert not {q.family for q in train_questions} & {f.name for f in FAMILIES.values() if f.exceptions}


def test_all_questions_about_a_fact_are_on_one_side(train_questions, held_questions):
    """Reading, repairing or using a form in a sentence asks about facts on the same side."""
    held_for_themselves = {
        fact for q in held_questions for fact in q.facts if len(q.facts) == 1 and not q.invented
    }
    assert not values(train_questions, "facts") & held_for_themselves


def test_no_prompt_or_task_is_on_two_sides():
    assert not {t.prompt for t in in_training()} & {t.prompt for t in held_out()}
    assert not {t.id for t in in_training()} & {t.id for t in held_out()}


def test_no_held_out_form_is_shown_in_training(train_questions):
    """Answers and prompts are checked, quoted or not. Homographs, forms of other words, do not count."""
    lemmas_of = defaultdict(set)
    for task in held_out():
        # The total of a held-out sum is a trained number; the parts are held out.
        dakota = task.data["answer"] in (FORM, WORDS, WORD) and task.data["family"] != "numerals"
        if dakota and task.data["split"] in ("lemma", "cell", "random"):
            for form in task.data["accept"]:
                lemmas_of[form].update(task.data["lemma_ids"])
    assert len(lemmas_of) > 200
    for question in train_questions:
        shown = {canonical(quoted) for quoted in re.findall('"([^"]+)"', question.ask)}
        shown |= {word for word in re.findall(r"[\w']+", canonical(question.ask)) if not word.isascii()}
        for form in (shown | set(question.accept)) & set(lemmas_of):
            assert not lemmas_of[form] & set(question.lemma_ids), (form, question)


def test_relatives_stay_on_one_side():
    yaza = "yazaŋ wayazaŋ wayazaŋka wowayazaŋ"
    for group in ("kaksa baksa wabaksa baksaksa naksa yaksa", yaza, "yawa wayawa"):
        assert len({is_held_out_lemma(lemma) for lemma in group.split()}) == 1, group


def test_every_class_is_on_both_sides():
    corpus = load_corpus()
    for words in (corpus.verbs, corpus.nouns):
        classes = Counter(word.klass for word in words)
        for klass in {klass for klass, count in classes.items() if count > 3}:
            assert len({is_held_out_lemma(word.lemma) for word in words if word.klass == klass}) == 2, klass


def test_the_parts_of_a_held_out_cell_are_trained(train_questions):
    """A cell is rule|class; both halves occur in training, but not together."""
    trained = {half for cell in values(train_questions, "cells") for half in _halves(cell)}
    for cell in HELD_OUT_CELLS:
        assert set(_halves(cell)) <= trained, cell


def _halves(cell):
    rule, _, klass = cell.partition("|")
    return f"{rule}|", f"|{klass}"


def test_every_axis_is_measured_and_the_held_out_names_exist(held_questions):
    assert {task.data["split"] for task in held_out()} == set(AXES)
    assert values(held_questions, "cells") >= HELD_OUT_CELLS
    assert values(held_questions, "rule_ids") >= HELD_OUT_RULES
    assert set(load_corpus().rules) >= HELD_OUT_RULES


def test_the_evaluation_is_fixed_and_capped():
    sizes = Counter((task.data["family"], task.data["split"]) for task in held_out())
    assert max(sizes.values()) <= EVAL_PER_SIDE
    assert {family for family, _ in sizes} == set(NAMES)
    assert len({task.id for task in held_out()}) == len(held_out())
    assert {task.id for task in eval_tasks(NAMES, DEPTHS, False)} == {task.id for task in held_out()}


@pytest.mark.parametrize("hint", [True, False])
def test_no_prompt_contains_its_answer(hint):
    tasks = [
        *TrainTasks(TaskOptions(hint=hint, invented_fraction=0.5), 4_000),
        *eval_tasks(NAMES, DEPTHS, hint),
    ]
    for task in tasks:
        words = re.findall(r"[^\W_]+", canonical(task.prompt))
        prompt = f" {' '.join(words)} "
        written = [answer.replace("'", " ") for answer in task.data["accept"]]
        assert not any(f" {answer} " in prompt for answer in written), task
        assert not set(task.data["accept"]) & set(task.data["prompt_forms"]), task


def test_hints_can_be_left_out():
    plain = TrainTasks(TaskOptions(hint=False), 300)
    assert not any("Rule:" in task.prompt for task in plain)
    assert sum("Rule:" in task.prompt for task in TrainTasks(TaskOptions(), 300)) > 150


def test_every_task_is_short_complete_and_paid_and_one_prompt_has_one_set_of_answers():
    rules, seen = load_corpus().rules, {}
    for task in (*in_training(), *held_out()):
        data = task.data
        assert task.prompt.endswith("in <answer></answer>.")
        assert len(task.prompt.split()) <= 120, task.prompt
        assert json.loads(json.dumps(data)) is not None
        assert set(data["rule_ids"]) <= set(rules), task
        assert all(data[name] for name in ("rule_ids", "accept", "lemma_ids")), task
        assert data["depth"] in DEPTHS
        assert all(canonical(form) == form for form in data["accept"]), task
        assert seen.setdefault(task.prompt, set(data["accept"])) == set(data["accept"]), task
        for form in data["accept"]:
            assert grade(f"<answer>{form}</answer>", data, shaping=False).reward == 1.0, task


def test_train_families_are_drawn_evenly_and_have_their_depths():
    counts = Counter(task.data["family"] for task in in_training())
    trained = [name for name in NAMES if train_depths(name)]
    assert set(counts) == set(trained)
    assert all(0.7 < counts[name] * len(trained) / len(in_training()) < 1.3 for name in trained), counts
    depths = defaultdict(set)
    for task in in_training():
        depths[task.data["family"]].add(task.data["depth"])
    assert all(depths[name] <= train_depths(name) for name in trained)
    assert set().union(*depths.values()) == set(DEPTHS)


def test_depths_can_be_chosen():
    tasks = TrainTasks(TaskOptions(depths=(2,)), 300)[:]
    assert {task.data["depth"] for task in tasks} == {2}
    assert {task.data["depth"] for task in eval_tasks(NAMES, (2, 3), True)} == {2, 3}
    with pytest.raises(ArgumentError, match="conjugate: 1"):
        TrainTasks(TaskOptions(families=("conjugate",), depths=(4,)), 10)


def test_invented_words_are_marked_new_and_never_in_the_evaluation():
    invented = [task for task in in_training() if task.data["invented"]]
    assert len(invented) > 500
    words = {strip_diacritics(word) for word in load_corpus().words}
    for task in invented:
        assert not any(strip_diacritics(lemma) in words for lemma in task.data["lemma_ids"][:1]), task
    assert not any(task.data["invented"] for task in held_out())
    assert not any(task.data["invented"] for task in TrainTasks(TaskOptions(), 500))


def test_invented_words_sound_like_the_train_lemmas():
    syllable = re.compile(r"([^aeiou]*)([aeiou]ŋ?)")
    trained = [w for e in load_corpus().entries for w in canonical(e.form).split()]
    known = {onset for word in trained for onset, _ in syllable.findall(word)} | {"y", "k"}
    for task in in_training():
        if task.data["invented"] and task.data["family"] in ("conjugate", "possess"):
            lemma = task.data["lemma_ids"][0]
            parts = syllable.findall(lemma)
            assert "".join(onset + vowel for onset, vowel in parts) == lemma
            assert {onset for onset, _ in parts} <= known, lemma


def test_small_numbers_make_up_training_and_large_ones_the_range_axis():
    rank = [int(t.data["lemma_ids"][0]) for t in held_out() if t.data["split"] == "range"]
    assert rank
    assert min(rank) >= 1
    written = [t for t in in_training() if t.data["facts"][0].startswith("number/")]
    numbers = {int(fact.partition("/")[2]) for t in written for fact in t.data["facts"] if fact[7:].isdigit()}
    assert numbers
    assert all(n < 100 or len(str(n).rstrip("0")) == 1 for n in numbers)


@given(st.integers(-(2**63), 2**63), st.integers(0, 10**9))
def test_any_seed_and_index_make_a_task(seed, index):
    task = TrainTasks(TaskOptions(seed=seed, invented_fraction=0.5), 10**9 + 1)[index]
    assert task.data["split"] == "train"
    reply = f"<answer>{task.data['accept'][0]}</answer>"
    assert grade(reply, task.data, shaping=True).reward == 1.0


def test_the_readme_tells_the_families_and_their_depths():
    readme = (Path(__file__).parents[1] / "README.md").read_text("utf-8")
    told = dict(re.findall(r"^\| `(\w+)` \| .* \| (\d(?:-\d)?) \|$", readme, re.M))
    depths = defaultdict(set)
    for task in (*in_training(), *held_out()):
        depths[task.data["family"]].add(task.data["depth"])
    assert told == {
        name: str(min(found)) if len(found) == 1 else f"{min(found)}-{max(found)}"
        for name, found in depths.items()
    }
