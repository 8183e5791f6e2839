"""Equal prompts, answers, observations and masks: what distinguishes a fault from a healthy run."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from tests.analysis.diagnosis.made_runs import END, FIRST, LETTERS, Made, make
from tests.analysis.diagnosis.test_rules import FLAT, last_letter, named, rising, with_metrics
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from buckeye.analysis.diagnosis.diagnose import diagnose

EVALUATED = range(10)


def task_of(line):
    return int(line["task_id"].split("-")[1])


def conversation(*contents):
    roles = ["user", "assistant"] * 2
    return [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]


def two_turns(observe, act="open"):
    """Return a function that adds a turn with the observation of a task."""

    def change(line):
        asked, said = (message["content"] for message in line["messages"])
        contents = [asked, act, observe(task_of(line)), said]
        return {**line, "turns": 2, "messages": conversation(*contents), "text": [" ".join(contents)]}

    return change


def with_conversations(run, lines):
    """Write evaluations at steps 0 and 13: contents, reward and name of each task."""
    for step in (0, 13):
        folder = run / "evals" / f"step_{step}"
        folder.mkdir(parents=True, exist_ok=True)
        records = (
            {
                "task_id": name,
                "rollout": 0,
                "reward": reward,
                "turns": len(contents) // 2,
                "messages": conversation(*contents),
                "text": [" ".join(contents)],
            }
            for contents, reward, name in lines
        )
        (folder / "made.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return run


@pytest.mark.parametrize(
    ("observe", "act", "name", "confidence"),
    [
        (lambda task: f"room {(task + 1) % 3}", "open", "eval-{}", None),
        (lambda task: f"room {task % 3}", "open", "eval-{}", "sure"),
        (lambda task: f"room {task % 3}", "wait", "eval-{}", "possible"),
        (lambda task: f"room {task % 3}", "wait", "train-{}", "sure"),
    ],
    ids=["other observations", "equal observations", "nothing to compare", "equal names"],
)
def test_equal_first_prompts_of_several_turns_are_equal_tasks_if_they_continue_alike(
    tmp_path, observe, act, name, confidence
):
    run = make(tmp_path / "run", Made(line=two_turns(lambda task: f"room {task % 3}")))
    lines = [((f"task {task}", act, observe(task), "zzz"), 0.5, name.format(task)) for task in EVALUATED]
    found = diagnose(with_conversations(run, lines)).findings
    assert [one.confidence for one in found if one.name == "evaluated_on_train"] == [confidence] * bool(
        confidence
    )


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_equal_conversations_with_other_rewards_are_other_tasks(tmp_path, reward):
    """Nothing but the reward depends on the hidden data of tasks."""
    same = two_turns(lambda task: "done")

    def change(line):
        earned = float(task_of(line) % 2)
        messages = [*same(line)["messages"][:-1], {"role": "assistant", "content": "zzz"}]
        return {**same(line), "messages": messages, "reward": earned, "shaped_reward": earned}

    run = make(tmp_path / "run", Made(line=change))
    contents = [(f"task {task}", "open", "done", "zzz") for task in EVALUATED]
    graded = [abs(reward - task % 2) for task in EVALUATED]
    lines = [
        (one, earned, f"eval-{task}") for task, (one, earned) in enumerate(zip(contents, graded, strict=True))
    ]
    assert ("evaluated_on_train" in named(with_conversations(run, lines))) == (reward == 0.0)


@pytest.mark.parametrize("are_options", [False, True])
def test_answers_that_all_prompts_list_are_options(tmp_path, are_options):
    def change(line):
        right, wrong = ("buy", "sell")[:: 1 if task_of(line) % 2 else -1]
        said = right if line["reward"] else "xyz"
        asked = f"{line['task_id']}: {f'{right} or {wrong}' if are_options else right}"
        return {**line, "messages": conversation(asked, said), "text": [f"{asked} {said}"]}

    found = diagnose(make(tmp_path / "run", Made(line=change))).findings
    assert ("answer_in_prompt" in [one.name for one in found]) == (not are_options)


TEMPLATE = (
    "{% for one in messages %}{{ '<u>' if one.role == 'user' else '<a>' }}{{ one.content }}</m>{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def with_template(run):
    """Write a tokenizer of the tokens of made runs, and a chat template whose header of replies is `<a>`."""
    vocabulary = {f"<{name}>": number for name, number in (("u", 1), ("a", 2), ("/m", END))}
    vocabulary |= {letter: FIRST + at for at, letter in enumerate("abcde")}
    vocabulary |= {f"task{task}": FIRST + LETTERS + task for task in range(12)} | {"?": 0}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    (run / "weights" / "step_0").mkdir(parents=True)
    tokenizer.save(str(run / "weights" / "step_0" / "tokenizer.json"))
    (run / "weights" / "step_0" / "chat_template.jinja").write_text(TEMPLATE)
    return run


@pytest.mark.parametrize("late", [0, 1])
def test_a_mask_that_begins_late_is_not_a_missing_header(tmp_path, late):
    def mask(mask):
        found = mask.copy()
        found[3 : 3 + late] = False
        return found

    found = named(with_template(make(tmp_path / "run", Made(mask=mask))))
    assert found[:1] == ["start_not_trained"] * late
    assert "no_assistant_header" not in found


@pytest.mark.parametrize("has_both", [False, True])
def test_held_out_answers_that_training_lacks_are_named(tmp_path, has_both):
    def change(line):
        answers = ("good", "bad") if has_both and task_of(line) % 2 else ("bad", "good")
        contents = (line["messages"][0]["content"], answers[bool(line["reward"])])
        return {**line, "messages": conversation(*contents), "text": [" ".join(contents)]}

    run = with_metrics(make(tmp_path / "run", replace(FLAT, line=change)), rising)
    lines = [
        ((f"review {task}", ("bad", "good")[task % 2]), float(task % 3 > 0), f"eval-{task}")
        for task in range(40)
    ]
    assert ("narrow_answers" in named(with_conversations(run, lines))) == (not has_both)


@pytest.mark.parametrize("others", ["room 1", "room 0"])
def test_one_observation_for_all_tasks_is_named_if_evaluations_have_others(tmp_path, others):
    def change(line):
        earned = float(task_of(line) % 2)
        return {**two_turns(lambda task: "room 0")(line), "reward": earned, "shaped_reward": earned}

    run = make(tmp_path / "run", replace(FLAT, tasks=20, reward=last_letter, line=change))
    lines = [((f"number {task}", "open", others, "zzz"), 0.5, f"eval-{task}") for task in EVALUATED]
    assert ("equal_observations" in named(with_conversations(run, lines))) == (others == "room 1")


@pytest.mark.parametrize("fits", [False, True])
def test_answers_that_do_not_fit_their_prompts_are_named(tmp_path, fits):
    """Reviews with `nice` are good; in training without `fits`, the answers belong to other reviews."""

    def asked(task):
        return f"review {task} {('nice', 'rude')[task % 2]}"

    def reward(word, task, rng):
        return float((word[-1] < 2) == (task % 2 if fits else task // 2 % 2))

    def change(line):
        contents = (line["messages"][0]["content"], "bg"[line["messages"][1]["content"][-1] in "ab"])
        return {**line, "messages": conversation(*contents), "text": [" ".join(contents)]}

    run = make(tmp_path / "run", Made(steps=14, tasks=64, asked=asked, reward=reward, line=change))
    lines = [
        ((asked(task), said), float((said == "g") == task % 2), f"eval-{task}")
        for task in range(100, 140)
        for said in "gb"
    ]
    assert ("unrelated_answers" in named(with_conversations(run, lines))) == (not fits)


@pytest.mark.parametrize("depends", [False, True])
def test_replies_that_always_fail_are_shown(tmp_path, depends):
    def change(line):
        two = two_turns(lambda task: f"room {task % 2}", act="look")(line)
        observed, said = task_of(line) % 2, "abc"[line["number_of_rollout"] % 3]
        has_failed = observed and said == "a" if depends else line["group"] % 4 == 0
        messages = [*two["messages"][:-1], {"role": "assistant", "content": said}]
        failure = {"reward": None, "error": "KeyError: 'door'"} if has_failed else {}
        return {**two, "messages": messages, **failure}

    numbers = iter(range(10_000))
    made = Made(size=6, line=lambda line: change({**line, "number_of_rollout": next(numbers)}))
    (found,) = (one for one in diagnose(make(tmp_path / "run", made)).findings if one.name == "rollouts_fail")
    assert ("Replies that always fail: 'a' to 'room 1'" in found.seen) == depends


@pytest.mark.parametrize("is_sorted", [True, False])
def test_only_the_order_of_starts_is_a_drift_of_tasks(tmp_path, is_sorted):
    """In an asynchronous run groups of short rollouts end first, and fill a batch together."""
    starts = np.random.default_rng(0).permutation(FLAT.steps * FLAT.groups)

    def change(line):
        group = line["group"]
        asked = "say it" if group // FLAT.groups % 2 else "what comes after a b c"
        messages = [{"role": "user", "content": asked}, line["messages"][-1]]
        return {**line, "messages": messages, "group": group if is_sorted else int(starts[group])}

    assert ("task_drift" in named(make(tmp_path / "run", replace(FLAT, line=change)))) == is_sorted


def with_call(observe, name="open"):
    """Return a function that adds a turn with a native call of another door in each group."""

    def change(line):
        function = {"name": name, "arguments": f'{{"door": {line["group"]}}}'}
        opens = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": function}]}
        room = {"role": "tool", "tool_call_id": "1", "content": observe(line["group"])}
        asked, said = line["messages"]
        text = f"{asked['content']} {function} {room['content']} {said['content']}"
        return {**line, "turns": 2, "messages": [asked, opens, room, said], "text": [text]}

    return change


def test_observations_after_other_calls_may_differ(tmp_path):
    """Calls of the model are not in the content of its messages."""
    change = with_call(lambda door: f"room {door}")
    run = make(tmp_path / "run", Made(line=change, reward=last_letter, steps=24))
    assert "unrepeatable_observations" not in named(run)


@pytest.mark.parametrize("name", ["open", ""])
def test_errors_after_malformed_calls_are_expected(tmp_path, name):
    change = with_call(lambda door: "error: nothing happens", name)
    run = make(tmp_path / "run", Made(line=change, reward=last_letter, steps=24))
    assert ("failing_observations" in named(run)) == bool(name)


def test_prompt_of_a_later_conversation_is_not_that_of_the_task(tmp_path):
    """The prompt of a second conversation has the reply of the first."""

    def change(line):
        first, said = line["text"][0], line["messages"][-1]["content"]
        second = [{"role": "user", "content": f"Is {said} right?"}, {"role": "assistant", "content": "yes"}]
        text = [first, f"Is {said} right? yes"]
        return {**line, "turns": 2, "turns_branched": 1, "messages": second, "text": text}

    assert "mixed_groups" not in named(make(tmp_path / "run", Made(line=change)))
