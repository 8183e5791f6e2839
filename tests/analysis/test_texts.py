"""Texts that the honesty check finds in prompts: formats, quotations, and answers."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buckeye.envs.base import Probe, Task
from buckeye.evaluation.checks.chance import e_value, option_count
from buckeye.evaluation.checks.task_text import (
    accepted_answers,
    answer_formats,
    apply_format,
    contains_as_word,
    prompt_contains,
    quotations_of,
)


def task(content, **data):
    return Task(id="1", messages=({"role": "user", "content": content},), data=data)


@pytest.mark.parametrize(
    ("prompt", "formats"),
    [
        ("Put it in <answer></answer>.", ["<answer>A</answer>"]),
        ("Reply as <answer>your word</answer>", ["<answer>A</answer>"]),
        (
            "<think>...</think> then <answer>...</answer>",
            ["<answer>A</answer>", "<think></think><answer>A</answer>"],
        ),
        (r"Put it in \boxed{}.", [r"\boxed{A}"]),
        ("End with\n#### number", ["#### A"]),
        ("Just say it. 3 < 4 > 2", []),
        ("<b></b> <a></a> <a></a>", ["<a>A</a>", "<b></b><a>A</a>"]),  # the most common first
    ],
)
def test_the_answer_format_is_read_from_the_prompt(prompt, formats):
    assert apply_format(None, "A") == "A"
    found = answer_formats([prompt, "another prompt"])
    assert [apply_format(pattern, "A") for pattern in found] == formats


def test_quotations_are_read_in_order():
    assert quotations_of(task('Add "mi" to “waŋ” or `ta`, not it\'s.')) == ["mi", "waŋ", "ta"]
    parts = [{"type": "text", "text": 'say "one"'}, {"type": "image_url", "image_url": {}}]
    assert quotations_of(task(parts)) == ["one"]


@pytest.mark.parametrize(
    ("data", "answers"),
    [
        ({"accept": ("a", "b")}, ("a", "b")),
        ({"accept": "ab"}, ("ab",)),
        ({"answer": "Paris"}, ("Paris",)),
        ({"accept": ("a",), "answer": "form"}, ("a",)),
        ({"answer": 4}, ("4",)),
        ({"answer": 0.5}, ("0.5",)),
        ({"answer": [1, 2]}, ("[1, 2]",)),
        ({"answer": ["a", "b"]}, ("a", "b")),
        ({"answer": None}, ()),
        ({"answer": {"a": 1}}, ()),
        ({"accept": (3, True, [1.5, "x"])}, ("3", "True", '[1.5, "x"]')),
        ({"accept": 7}, ("7",)),
        ({"answer": np.int64(7)}, ("7",)),
        ({"accept": np.array([7])}, ("7",)),
        ({}, ()),
    ],
)
def test_accepted_answers_are_read_from_the_data(data, answers):
    assert accepted_answers(task("?", **data)) == answers


@pytest.mark.parametrize(
    ("text", "answer", "there"),
    [
        ("the word wakaška means", "wakaška", True),
        ("the word wakaškapi means", "wakaška", False),
        ("kaška, wakaška.", "kaška", True),
        ("wakaška", "kaška", False),
        ("mani mani kta", "mani kta", True),
        ("a (b) c", "(b)", True),
        ("x2", "x", False),
        ("", "x", False),
    ],
)
def test_an_answer_is_found_as_a_word_of_its_own(text, answer, there):
    assert contains_as_word(text, answer) is there


@pytest.mark.parametrize(
    ("prompt", "answer", "there"),
    [
        ("it is 3", "3", True),
        ("it is 13, x3 or 3x", "3", False),
        ("it is 3.0", "3", True),
        ("it is 3.5 or 0.3", "3", False),
        ("it is 1,300", "1300", True),
        ("it is -3", "3", False),
        ("5-3 = ?", "3", True),
        ("2.", "2.0", True),
        ("sort 3, 1 and 2", "[3, 1, 2]", True),
        ("sort 3, 1, 1, 2", "[3, 1, 2]", False),
        ("so\nlong, Ŋ", "so long", True),
        ("anything", " ", False),
        ("the sum is #7", "#7", True),
    ],
)
def test_an_answer_is_looked_for_with_sense(prompt, answer, there):
    assert prompt_contains(prompt, answer) is there


@pytest.mark.parametrize(
    ("prompt", "answer", "options"),
    [
        ("Is it true or false?", "false", 2),
        ("Choose: red, green, or blue.", "green", 3),
        ("Choose one of 'red', 'green' and 'blue' now", "blue", 3),
        ("What?\nA) a cat\nB) a dog\nC) a cow\n", "B", 3),
        ("What?\n- a cat\n- a dog\n", "a cat", 2),
        ("Put yes, no or maybe in <answer></answer>", "maybe", 3),
        ("Yes/No?", "no", 2),
        ("The largest of 5, 8, 2?", "8", 3),
        ("A house (it is red). Which colour?", "red", 0),
        ("17 * 23 = ? (391)", "391", 0),
        ("Is it true or false?", "yes", 0),
    ],
)
def test_the_options_of_a_prompt_are_counted(prompt, answer, options):
    assert option_count(task(prompt), [answer]) == options


def test_evidence_grows_with_what_cannot_be_luck():
    """Hand-computed: a reward of 1 against a mean of 1/2 doubles the stake, and a reward of 0 loses it."""
    stakes = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
    assert e_value([1.0], 0.5) == pytest.approx(sum(1 + stake for stake in stakes) / 6)
    assert e_value([1.0, 0.0], 0.5) == pytest.approx(sum(1 - stake**2 for stake in stakes) / 6)
    assert e_value([], 0.5) == 1.0
    assert e_value([0.1] * 60, 0.03) > 1e6  # a reward that is always given is certain, however small
    assert e_value([1.0] * 10 + [0.0] * 10, 0.5) < 1.0
    assert e_value([1.0], 1.0) == 0.0
    assert e_value([1.0] * 10_000, 0.0) > 1e6


@given(st.floats(0.01, 0.99), st.integers(1, 12))
def test_evidence_is_one_in_the_mean_where_there_is_nothing_to_find(mean, count):
    """The mean over all outcomes of `count` rewards of 0 or 1 is exactly 1.

    So the probability that the evidence reaches 1 / p is at most p.
    """
    expected = sum(
        math.comb(count, ones)
        * mean**ones
        * (1 - mean) ** (count - ones)
        * e_value([1.0] * ones + [0.0] * (count - ones), mean)
        for ones in range(count + 1)
    )
    assert expected == pytest.approx(1.0)


@given(st.text("abŋ -", max_size=30), st.text("abŋ", min_size=1, max_size=4))
def test_words_of_letters_are_found_where_they_are_words(text, answer):
    assert contains_as_word(text, answer) == (answer in text.replace("-", " ").split())


def test_a_probe_has_ordered_bounds(refusal):
    with refusal(ValueError):
        Probe(name="p", task=task("?"), reply="", low=1.0, high=0.0)
