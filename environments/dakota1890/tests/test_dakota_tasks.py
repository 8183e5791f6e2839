"""Task sequences are reproducible, disjoint where they must be, and never give their answer away."""

import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dakota1890 import load_environment
from dakota1890.corpus import load_corpus
from dakota1890.morphology import numeral
from dakota1890.orthography import bare, canonical
from dakota1890.splits import held_out_lemma, held_out_number
from dakota1890.tasks import FAMILIES, TaskOptions, TrainTasks, eval_numbers, eval_tasks, lemma_tasks

FACTS = {
    split: [t for f in FAMILIES if f != "numerals" for t in lemma_tasks(f, split, True)]
    for split in ("train", "eval")
}
TRAIN = TrainTasks(TaskOptions(invented_fraction=0.5), 4_000)[:]
EVAL = eval_tasks(FAMILIES, True)


def lemmas(tasks):
    return {lemma for task in tasks for lemma in task.data["lemma_ids"]}


def test_train_items_depend_on_seed_and_index_alone():
    options = TaskOptions(invented_fraction=0.3, seed=7)
    once, again = TrainTasks(options, 1_000), TrainTasks(options, 50)
    assert [once[i] for i in (49, 3, 17)] == [again[49], again[3], again[17]]
    assert once[-1] == once[999]
    assert once[10:13] == [once[10], once[11], once[12]]
    assert TrainTasks(TaskOptions(seed=8), 50)[:20] != again[:20]
    with pytest.raises(IndexError):
        once[1_000]


def test_tasks_are_the_same_in_every_process():
    code = (
        "from dakota1890 import load_environment; e = load_environment(invented=True);"
        "print([t.id for split in ('train', 'eval') for t in e.tasks(split)[:50]])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_no_lemma_number_or_answer_crosses_the_split():
    assert not lemmas(FACTS["train"]) & lemmas(FACTS["eval"])
    assert not lemmas(TRAIN) & lemmas(EVAL)
    train_answers = {
        a for t in (*TRAIN, *FACTS["train"]) if t.data["family"] != "numerals" for a in t.data["accept"]
    }
    assert not train_answers & {answer for task in EVAL for answer in task.data["accept"]}
    assert not {t.messages[0]["content"] for t in TRAIN} & {t.messages[0]["content"] for t in EVAL}
    assert not {t.id for t in TRAIN} & {t.id for t in EVAL}


def test_relatives_stay_on_one_side():
    for group in (
        "kaksa baksa wabaksa baksaksa naksa yaksa",
        "yazaŋ wayazaŋ wayazaŋka wowayazaŋ",
        "yawa wayawa",
    ):
        assert len({held_out_lemma(lemma) for lemma in group.split()}) == 1, group


def test_the_split_does_not_depend_on_the_seed_or_on_hints():
    first, other = load_environment(seed=1), load_environment(seed=2, hints="none", invented=True)
    assert [t.id for t in first.tasks("eval")] == [t.id for t in EVAL]
    assert [t.data["accept"] for t in sorted(other.tasks("eval"), key=lambda t: t.data["accept"])] == sorted(
        t.data["accept"] for t in EVAL
    )


def test_every_class_is_on_both_sides():
    corpus = load_corpus()
    for words in (corpus.verbs, corpus.nouns):
        for klass in {word.klass for word in words} - {"alienable, keeps the whole prefix"}:
            assert len({held_out_lemma(word.lemma) for word in words if word.klass == klass}) == 2, klass


def test_the_evaluation_is_large_enough_and_no_family_dominates():
    sizes = {family: sum(task.data["family"] == family for task in EVAL) for family in FAMILIES}
    assert sum(sizes.values()) >= 500
    assert sizes["numerals"] == 200
    assert all(70 <= size <= len(EVAL) / 2 for size in sizes.values()), sizes
    assert len({task.id for task in EVAL}) == len(EVAL)


def test_held_out_numbers_span_the_range_and_never_the_ten_units():
    assert not any(held_out_number(number) for number in range(1, 11))
    assert all(held_out_number(number) for number in eval_numbers())
    assert {len(str(number)) for number in eval_numbers()} == {2, 3, 4}
    assert {len(t.data["lemma_ids"][0]) for t in TRAIN if t.data["family"] == "numerals"} == {1, 2, 3, 4}


@pytest.mark.parametrize("hint", [True, False])
def test_no_prompt_holds_its_answer(hint):
    tasks = [*TrainTasks(TaskOptions(hint=hint, invented_fraction=0.5), 2_000), *eval_tasks(FAMILIES, hint)]
    for task in tasks:
        prompt = " " + " ".join(re.findall(r"[\w']+", task.messages[0]["content"].lower())) + " "
        assert not any(f" {answer} " in prompt for answer in task.data["accept"]), task
        assert not any(answer in task.data["prompt_forms"] for answer in task.data["accept"]), task


def test_prompts_are_short_and_ask_for_the_tag():
    for task in (*TRAIN, *EVAL):
        (message,) = task.messages
        assert message["role"] == "user"
        assert message["content"].endswith("in <answer></answer>.")
        assert len(message["content"].split()) <= 45


def test_hints_can_be_left_out():
    plain = TrainTasks(TaskOptions(hint=False), 300)
    assert not any("Rule:" in task.messages[0]["content"] for task in plain)
    assert sum("Rule:" in task.messages[0]["content"] for task in TrainTasks(TaskOptions(), 300)) > 200


def test_task_data_is_complete_and_its_rules_exist():
    rules = load_corpus().rules
    for task in (*TRAIN, *EVAL):
        assert {"family", "split", "rule_ids", "lemma_ids", "depth", "accept", "prompt_forms"} <= set(
            task.data
        )
        assert set(task.data["rule_ids"]) <= set(rules)
        assert task.data["rule_ids"] or task.data["family"] == "dictionary"
        assert task.data["accept"]
        assert all(canonical(answer) == answer for answer in task.data["accept"])
        assert task.data["depth"] in (1, 2, 3, 4)


def test_one_prompt_has_one_set_of_answers():
    seen = {}
    for task in (*TRAIN, *FACTS["train"], *EVAL):
        prompt = task.messages[0]["content"]
        assert seen.setdefault(prompt, set(task.data["accept"])) == set(task.data["accept"]), prompt


def test_invented_words_are_marked_new_and_never_in_the_evaluation():
    invented = [task for task in TRAIN if task.data.get("invented")]
    real = [t for t in TRAIN if not t.data.get("invented") and t.data["family"] in ("conjugate", "possess")]
    assert 0.4 < len(invented) / len(invented + real) < 0.6
    assert len(lemmas(invented)) > 0.95 * len(invented)
    recorded = {bare(word) for word in load_corpus().words}
    held = {bare(answer) for task in EVAL for answer in task.data["accept"]}
    for task in invented:
        assert "an invented word" in task.messages[0]["content"]
        assert bare(task.data["lemma_ids"][0]) not in recorded
        assert not {bare(answer) for answer in task.data["accept"]} & (recorded | held)
    assert not any(task.data.get("invented") for task in EVAL)


def test_invented_words_sound_like_the_train_lemmas():
    syllable = re.compile(r"([^aeiou]*)([aeiou]ŋ?)")
    trained = [w for e in load_corpus().entries for w in canonical(e.form).split()]
    known = {onset for word in trained for onset, _ in syllable.findall(word)} | {"y", "k"}
    for task in TRAIN:
        if task.data.get("invented"):
            lemma = task.data["lemma_ids"][0]
            parts = syllable.findall(lemma)
            assert "".join(onset + vowel for onset, vowel in parts) == lemma
            assert {onset for onset, _ in parts} <= known, lemma


def test_without_invented_there_are_none():
    assert not any(task.data.get("invented") for task in load_environment(num_train=500).tasks("train"))


@settings(max_examples=50, deadline=None)
@given(st.integers(-(2**63), 2**63), st.integers(0, 10**9))
def test_any_seed_and_index_make_a_task(seed, index):
    task = TrainTasks(TaskOptions(seed=seed, invented_fraction=0.5), 10**9 + 1)[index]
    assert task.data["split"] == "train"
    if task.data["family"] == "numerals":
        assert task.data["accept"] == numeral(int(task.data["lemma_ids"][0]))
