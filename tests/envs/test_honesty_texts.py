"""What the honesty check reads from prompts: formats, quotations, answers that stand in the text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buckeye.envs.base import Probe, Task
from buckeye.envs.honesty.task_checks import holds
from buckeye.envs.honesty.texts import ANSWER, accepted_answers, answer_formats, in_format, quotations_of


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
    ],
)
def test_the_answer_format_is_read_from_the_prompt(prompt, formats):
    found = answer_formats([prompt, "another prompt"])
    assert [in_format(pattern, "A") for pattern in found] == formats


def test_the_most_common_tags_come_first():
    assert answer_formats(["<b></b>", "<a></a>", "<a></a>"])[0] == f"<a>{ANSWER}</a>"


def test_a_bare_answer_stays_bare():
    assert in_format(None, "yes") == "yes"


def test_quotations_are_read_in_order():
    assert quotations_of(task('Add "mi" to “waŋ” or `ta`, not it\'s.')) == ["mi", "waŋ", "ta"]


def test_the_text_parts_of_a_message_are_its_text():
    parts = [{"type": "text", "text": 'say "one"'}, {"type": "image_url", "image_url": {}}]
    assert quotations_of(task(parts)) == ["one"]


@pytest.mark.parametrize(
    ("data", "answers"),
    [
        ({"accept": ("a", "b")}, ("a", "b")),
        ({"accept": "ab"}, ("ab",)),
        ({"answer": "Paris"}, ("Paris",)),
        ({"accept": ("a",), "answer": "form"}, ("a",)),
        ({"answer": 4}, ()),
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
    assert holds(text, answer) is there


@given(st.text("abŋ -", max_size=30), st.text("abŋ", min_size=1, max_size=4))
def test_words_of_letters_are_found_where_they_are_words(text, answer):
    assert holds(text, answer) == (answer in text.replace("-", " ").split())


def test_a_probe_has_ordered_bounds():
    with pytest.raises(ValueError, match="probe 'p': low is 1 and high is 0"):
        Probe(name="p", task=task("?"), reply="", low=1.0, high=0.0)
