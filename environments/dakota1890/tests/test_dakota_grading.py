"""Correct answers in any spelling are rewarded, all others are not, and two graders always agree."""

import json
import random
import unicodedata
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from environments.dakota1890.tests.second_grader import audited_reward, edits_between
from hypothesis import given
from hypothesis import strategies as st

from dakota1890.corpus import load_corpus
from dakota1890.environment import load_environment
from dakota1890.families import FAMILIES
from dakota1890.grading import grade, levenshtein
from dakota1890.morphology.numerals import numeral
from dakota1890.probes import probes
from dakota1890.tasks import DEPTHS, eval_tasks


def task_data(accept, *, prompt_forms=(), floor_forms=(), answer="form"):
    return {
        "accept": accept,
        "prompt_forms": prompt_forms,
        "floor_forms": floor_forms,
        "answer": answer,
        "split": "train",
    }


KASKA = task_data(("wakaška",), prompt_forms=("kaška",), floor_forms=("kaška",))
READ = task_data(("2536",), answer="number")


def tagged(answer):
    return f"Let me think. <answer>{answer}</answer>"


def graded(text, data=KASKA, *, shaping=True, truncated=False):
    result = grade(text, data, shaping=shaping, truncated=truncated)
    assert audited_reward(text, data, shaping=shaping) == pytest.approx(result.reward, abs=1e-9)
    return result


REPLIES = json.loads((Path(__file__).parent / "replies.json").read_text("utf-8"))
RIGHT, WRONG = REPLIES["right"], REPLIES["wrong"]
"""Answers in any spelling of KASKA's, and replies that try to be rewarded for something else, by name."""


@pytest.mark.parametrize("answer", RIGHT.values(), ids=RIGHT)
@pytest.mark.parametrize("shaping", [True, False])
def test_right_answer_has_full_reward_in_any_spelling(answer, shaping):
    result = graded(tagged(answer), shaping=shaping)
    assert (result.reward, result.tier) == (1.0, "exact")


@pytest.mark.parametrize("reply", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("shaping", [True, False])
def test_hacks_score_zero(reply, shaping):
    result = graded(reply, shaping=shaping)
    assert result.reward == 0.0
    assert result.components["exact"] == 0.0


@pytest.mark.parametrize("answer", ["wakaska", "WAKASKA", "wakas\u0323ka", "wakaš\u030cka"])
def test_lost_or_wrong_marks_have_partial_reward(answer):
    result = graded(tagged(answer), shaping=False)
    assert (result.reward, result.tier, result.components["ortho_miss"]) == (0.3, "diacritics", 1.0)


def test_n_for_eng_is_a_diacritic_miss():
    data = task_data(("uŋštaŋpi", "uŋyuštaŋpi"), prompt_forms=("yuštaŋ",), floor_forms=("yuštaŋ",))
    assert graded(tagged("unstanpi"), data).reward == 0.3
    assert graded(tagged("uŋštaŋpi"), data).reward == graded(tagged("uŋyuštaŋpi"), data).reward == 1.0


def test_reasoning_is_free_and_may_mention_the_tags_inside_think():
    assert graded("word " * 2_000 + tagged("wakaška")).reward == 1.0
    assert (
        graded("<think>Put it in <answer></answer>, maybe kaška.</think>" + tagged("wakaška")).reward == 1.0
    )


def test_near_miss_is_rewarded_only_in_training():
    # sim(wakašku, wakaška) = 6/7, the stem alone reaches sim(kaška, wakaška) = 5/7: 0.2 * (1/7) / (2/7) = 0.1
    assert graded(tagged("wakašku")).reward == pytest.approx(0.1)
    assert graded(tagged("wakašku"), shaping=False).reward == 0.0


def test_a_cut_reply_without_an_answer_is_truncated_and_a_finished_answer_counts():
    result = graded("Let me think about", truncated=True)
    assert (result.reward, result.tier, result.components["truncated"]) == (0.0, "truncated", 1.0)
    assert graded(tagged("wakaška") + " and furth", truncated=True).reward == 1.0


def test_a_number_has_to_be_the_right_number():
    data = task_data(numeral(2_536), answer="words")
    assert graded(tagged(numeral(2_536)[-1]), data).reward == 1.0
    assert graded(tagged(numeral(2_537)[0]), data, shaping=False).reward == 0.0
    assert graded(tagged(" ".join(reversed(numeral(2_536)[0].split()))), data, shaping=False).reward == 0.0


@pytest.mark.parametrize("answer", ["2536", "2,536", "2 536", " 2536.", "“2536”"])
def test_a_number_may_be_grouped(answer):
    assert graded(tagged(answer), READ).reward == 1.0


@pytest.mark.parametrize(
    "answer", ["25,36", "2,536,", "2536 2536", "2536, 2537", "2537", "02536", "2536.0", "two", "٢٥٣٦"]
)
def test_another_number_is_wrong(answer):
    assert graded(tagged(answer), READ).reward == 0.0


def test_near_miss_of_a_held_out_task_scores_zero():
    data = KASKA | {"split": "lemma"}
    assert graded(tagged("wakašku"), data).reward == 0.0
    assert graded(tagged("wakaška"), data).reward == 1.0


def test_components_do_not_change_the_reward():
    result = graded(tagged("kaška"))
    assert result.components["sim"] > 0.7
    assert result.components["format_ok"] == 1.0
    assert result.reward == 0.0


@cache
def environment():
    return load_environment(invented=True)


TASKS = st.deferred(
    lambda: st.sampled_from([*environment().tasks("train")[:400], *environment().tasks("eval")[:400]])
)
DAKOTA_NOISE = "abćdeġghḣikmnŋopsštuwyzžśǧáéčʼ'’ -.,;|\n\u030c\u0301\u0304\u200b\u0327аορ"
replies = st.one_of(
    st.text(max_size=60),
    st.text(alphabet=DAKOTA_NOISE, max_size=40).map(tagged),
    st.lists(
        st.sampled_from(["<answer>", "</answer>", "</think>", "wakaška", "kaška", " ", "or"]), max_size=8
    ).map("".join),
)


@given(TASKS, replies, st.booleans())
def test_both_graders_agree_on_anything(task, reply, shaping):
    result = graded(reply, task.data, shaping=shaping)
    assert 0.0 <= result.reward <= 0.2 or result.reward in (0.3, 1.0)


@given(TASKS, st.integers(0, 2**32), st.integers(1, 3), st.booleans())
def test_both_graders_agree_on_mutated_answers(task, seed, edits, shaping):
    rng = random.Random(seed)
    letters = list(rng.choice(task.data["accept"]))
    for _ in range(edits):
        at = rng.randrange(len(letters) + 1)
        letters[at : at + rng.randrange(2)] = rng.choice(DAKOTA_NOISE)
    reply = tagged("".join(letters))
    result = graded(reply, task.data, shaping=shaping)
    assert audited_reward(reply, task.data, shaping=shaping) == pytest.approx(result.reward, abs=1e-12)


@given(TASKS, st.data(), st.sampled_from(["NFC", "NFD", "NFKD"]))
def test_every_accepted_answer_is_right_in_every_encoding(task, data, encoding):
    answer = data.draw(st.sampled_from(task.data["accept"]))
    assert graded(tagged(unicodedata.normalize(encoding, answer)), task.data).reward == 1.0


@given(TASKS)
def test_two_answers_at_once_are_never_right(task):
    first, prompt = task.data["accept"][0], task.messages[0]["content"]
    for reply in (f"{first}, {first}", f"{first} {first}", f"{first} or {first}", prompt):
        assert graded(tagged(reply), task.data).reward == 0.0
    assert graded(tagged(f"{first} zzz"), task.data).reward <= 0.2
    assert graded(tagged(f"{first} zzz"), task.data, shaping=False).reward == 0.0


@given(st.text(alphabet="abŋ ", max_size=12), st.text(alphabet="abŋ ", max_size=12))
def test_both_edit_distances_are_the_textbook_one(one, other):
    table = [[i + j for j in range(len(other) + 1)] for i in range(len(one) + 1)]
    for i, a in enumerate(one):
        for j, b in enumerate(other):
            table[i + 1][j + 1] = min(table[i][j] + (a != b), table[i][j + 1] + 1, table[i + 1][j] + 1)
    assert levenshtein(one, other) == edits_between(one, other) == table[-1][-1]


@cache
def all_probes():
    return probes(eval_tasks(tuple(FAMILIES), DEPTHS, True))


def test_every_probe_gets_its_score():
    assert {probe.item.data["family"] for probe in all_probes()} == set(FAMILIES)
    assert len({probe.name for probe in all_probes()}) >= 30
    for probe in all_probes():
        assert graded(probe.reply, probe.item.data, shaping=False).reward == probe.reward, probe


@given(st.text(alphabet="0123456789,. ", max_size=12))
def test_both_graders_read_numbers_alike(answer):
    assert graded(tagged(answer), READ).reward in (0.0, 1.0)


@cache
def train_tasks():
    return environment().tasks("train")[:6_000]


def mean_by_family(tasks, answer, *, shaping):
    totals = {}
    for task in tasks:
        reply = tagged(answer(task))
        totals.setdefault(task.data["family"], []).append(graded(reply, task.data, shaping=shaping).reward)
    return {family: sum(rewards) / len(rewards) for family, rewards in totals.items()}


SPLITS = ("random", "lemma", "cell", "rule", "range", "exception")


@pytest.mark.parametrize("split", [pytest.param("train", marks=pytest.mark.e2e), *SPLITS])
def test_policies_without_content_score_near_zero(split):
    """Checked per family and split; policies that answer at random are checked over the whole split."""
    rng = random.Random(0)
    tasks = train_tasks()[:2_000] if split == "train" else environment().tasks(split)
    answers = {}
    for task in train_tasks()[:3_000]:
        answers.setdefault(task.data["family"], []).append(task.data["accept"][0])
    words = sorted(load_corpus().words)
    policies = {
        "empty": lambda task: "",
        "echo of a word": lambda task: (task.data["prompt_forms"] or ("",))[0],
        "echo of all words": lambda task: " ".join(task.data["prompt_forms"]),
        "words in reverse": lambda task: " ".join(task.data["prompt_forms"][::-1]),
        "words in any order": lambda task: " ".join(
            rng.sample(forms := task.data["prompt_forms"], len(forms))
        ),
        "echo of the prompt": lambda task: task.messages[0]["content"],
        "affix dump": lambda task: "wayauŋmanimipikta",
        "random lexicon word": lambda task: rng.choice(words),
        "another task's answer": lambda task: rng.choice(answers.get(task.data["family"], [""])),
        "letters": lambda task: "aeotnsrihkpŋš",
    }
    for name, policy in policies.items():
        means = mean_by_family(tasks, policy, shaping=split == "train")
        assert max(means.values()) <= 0.03, (name, means)


@pytest.mark.parametrize(
    "family",
    [
        name if name in ("conjugate", "possess") else pytest.param(name, marks=pytest.mark.slow)
        for name in sorted(FAMILIES)
    ],
)
def test_best_constant_answer_scores_near_zero(family):
    """The constants are the most frequent answers in training, checked on all held-out tasks."""
    held_out = [task for task in environment().tasks("eval") if task.data["family"] == family]
    train = [task for task in train_tasks() if task.data["family"] == family]
    common = Counter(form for task in train for form in task.data["accept"])
    constants = [form for form, _ in common.most_common(20)] or [held_out[0].data["accept"][0]]
    for tasks, shaping in ((held_out, False), (train, True)):
        if tasks:
            best = max(constant_reward(c, tasks, shaping) for c in constants)
            assert best <= 0.03


def constant_reward(constant, tasks, shaping):
    return sum(grade(tagged(constant), task.data, shaping=shaping).reward for task in tasks) / len(tasks)
