"""`buckeye env play`: input of a person, of chance, or of a model, and the saved rollouts."""

import json
import random
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.command import run_here
from tests.evaluation.chat_server import chat_server
from tests.evaluation.test_eval_mcp import RAW

from buckeye.evaluation.env_play.human_policy import read_arguments
from buckeye.evaluation.env_play.random_policy import conversation_words, random_value
from buckeye.mcp.actions.schema_text import make_example
from buckeye.trainer.data.chat_data import ChatFile, ChatFormat
from buckeye.trainer.model.tiny import TinySize, make_tiny_model

GREETINGS = """
from buckeye.envs.base import Outcome, Task
from buckeye.envs.call_arguments import read_arguments

GREET = {"name": "greet", "description": "Greets.", "parameters": {"type": "object", "required": ["who"],
         "properties": {"who": {"type": "string", "enum": ["ann", "bob"]}, "loud": {"type": "boolean"}}}}


class Greetings:
    name = "greetings"

    def tasks(self, split):
        if split != "train":
            raise KeyError(split)
        return [Task(id=f"t{n}", messages=({"role": "user", "content": f"Greet {who}."},), data={"who": who})
                for n, who in enumerate(["ann", "bob", "broken"])]

    async def rollout(self, task, policy):
        conversation, greeted, errors, turns = list(task.messages), [], 0, 0
        while True:
            reply = await policy.chat(conversation, tools=[{"type": "function", "function": GREET}])
            turns += 1
            conversation.append(reply.message)
            calls = reply.message.get("tool_calls") or ()
            if not calls or turns == 4:
                break
            for call in calls:
                text, failed = self.greet(call["function"], task, greeted)
                errors += failed
                conversation.append({"role": "tool", "tool_call_id": call["id"], "content": text})
        components = {"n_turns": turns, "tool_calls": len(greeted) + errors, "tool_errors": errors}
        reward = float(task.data["who"] in greeted)
        return Outcome(reward=reward, components=components, stop_reason="answered")

    def greet(self, function, task, greeted):
        if function["name"] != "greet":
            return "Error: no tool " + function["name"], True
        who = read_arguments(function["arguments"]).get("who")
        if who not in ("ann", "bob"):
            return "Error: who must be ann or bob", True
        if task.id == "t2":
            raise OSError("the hall is closed")
        greeted.append(who)
        return "Hello, \\x1b[31m" + who, False


def load_environment():
    return Greetings()
"""
SIZE = TinySize(vocab_size=300, layers=1, hidden=64, max_length=512)
CONFIG = """
system_prompt: Win.
parser: {use_thinking: true}
action_mappings:
  act: {_tool: act, _parser: {positional: [text]}, text: {from_arg: text}}
rubric: {weights: {task_completion: 1.0}}
"""


@pytest.fixture
def greetings(tmp_path):
    (tmp_path / "greetings.py").write_text(GREETINGS)
    return tmp_path


@pytest.fixture
def typed(monkeypatch):
    """Return a function that types lines and then ends the input."""

    def type_lines(*lines):
        rest = list(lines)

        def answer(prompt):
            if not rest:
                raise EOFError
            return rest.pop(0)

        monkeypatch.setattr("builtins.input", answer)

    return type_lines


def play(cwd, *words, code=0):
    done = run_here("env", "play", *words, cwd=cwd)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def test_a_person_is_shown_the_prompt_the_results_and_the_reward(greetings, typed, wording):
    typed("", "?", "greet(who=nobody)", "greet('ann', loud=true)", "I have \\", "greeted.")
    out = play(greetings, "greetings.py").stdout
    assert out == wording
    assert "\x1b" not in out  # text of others must not control the terminal


def test_a_misspelled_call_is_not_sent_unless_it_is_typed_again(greetings, typed):
    typed("gret(who='ann')", "greet(who='ann'", "greet(who='ann')", "f(x)", "f(x)")
    out = play(greetings, "greetings.py").stdout
    assert out.count("Did you mean greet?") == 1
    assert out.count("no closing parenthesis") == 1
    assert "Hello" in out
    assert "reward 1.0000" in out


def test_the_end_of_the_input_is_130_and_keeps_what_was_played_before(greetings, typed):
    typed("greet('ann')", "done", "greet('bob')")
    play(greetings, "greetings.py", "-n", "2", "--save", "chats.jsonl", code=130)
    (line,) = (greetings / "chats.jsonl").read_text().splitlines()
    chat = json.loads(line)
    assert [message["role"] for message in chat["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert chat["tools"][0]["function"]["name"] == "greet"


@pytest.mark.e2e
def test_ctrl_c_while_a_person_thinks_is_130_and_leaves_nothing(greetings):
    argv = [sys.executable, "-m", "buckeye", "env", "play", "greetings.py"]
    with subprocess.Popen(
        argv, cwd=greetings, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout:
            if line == "Greet ann.\n":
                break
        process.send_signal(2)
        assert process.wait(30) == 130


def test_chance_plays_tasks_in_turn_and_what_earns_enough_is_kept(greetings):
    words = ("--policy", "random", "--task", "t1", "-n", "8", "--json")
    done = play(greetings, "greetings.py", *words, "--save", "chats.jsonl", "--min-reward", "1")
    records = [json.loads(line) for line in done.stdout.splitlines()]
    ids = sorted(record["task_id"] for record in records)
    assert ids == ["t0", "t0", "t1", "t1", "t1", "t2", "t2", "t2"]
    errors = {record["error"] for record in records if record["error"]}
    assert errors == {"OSError: the hall is closed (greetings.py:42 in greet)"}
    won = sum(record["reward"] == 1.0 for record in records)
    assert 0 < won < 8
    assert len((greetings / "chats.jsonl").read_text().splitlines()) == won
    again = play(greetings, "greetings.py", *words)
    repeated = [json.loads(line) for line in again.stdout.splitlines()]
    assert sorted(str(one["messages"]) for one in repeated) == sorted(str(one["messages"]) for one in records)


def test_save_without_a_qualifying_rollout_is_an_error_with_the_highest_reward(greetings, wording):
    words = ("--policy", "random", "-n", "2", "--save", "chats.jsonl", "--min-reward")
    done = play(greetings, "greetings.py", *words, "1.5", code=1)
    assert done.stderr == wording
    play(greetings, "greetings.py", *words, "0")
    again = play(greetings, "greetings.py", *words, "1.5")  # the file has chats of earlier calls
    assert again.stderr == "chats.jsonl: 0 of 2 chats appended\n"


def test_what_is_played_can_be_learnt_by_sft(greetings):
    play(greetings, "greetings.py", "--policy", "random", "-n", "2", "--save", "chats.jsonl")
    make_tiny_model(greetings / "model", texts=["Greet ann."], size=SIZE, seed=0)
    chat = ChatFormat(str(greetings / "model"))
    assert len(ChatFile(greetings / "chats.jsonl", chat, seed=0, seq_len=4096)) == 2


def test_a_model_behind_an_address(greetings, wording):
    call = {"id": "c1", "type": "function", "function": {"name": "greet", "arguments": '{"who": "bob"}'}}

    def answer(body, _):
        if body["messages"][-1]["role"] == "tool":
            return "Greeted."
        return {"role": "assistant", "content": None, "tool_calls": [call]}

    with chat_server(answer) as (url, _):
        done = play(greetings, "greetings.py", "--task", "2", "--policy", "m", "--base-url", url)
    assert done.stdout == wording


def test_an_environment_that_fails_is_one_message(greetings, typed, wording):
    typed("greet('ann')")
    done = play(greetings, "greetings.py", "--task", "3", code=1)
    assert done.stdout == wording
    assert done.stderr == wording


def test_an_error_that_repeats_is_printed_once_and_ends_the_rollouts(greetings):
    (greetings / "greetings.py").write_text(
        "from buckeye.envs.base import Outcome, Task\n"
        "class Broken:\n"
        "    name, splits = 'broken', ('train',)\n"
        "    def tasks(self, split):\n"
        "        return [Task(id='t', messages=({'role': 'user', 'content': 'Hi'},), data={})]\n"
        "    async def rollout(self, task, policy):\n"
        "        return Outcome(reward=None, error='no server')\n"
        "def load_environment():\n"
        "    return Broken()\n"
    )
    done = play(greetings, "greetings.py", "--policy", "random", "-n", "20", "--at-once", "1", code=1)
    assert done.stdout == "t: no reward: no server\n"
    assert "5 rollouts in a row; 15 of 20 not started" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("--task", "4"),
        ("--split", "eval"),
        ("--base-url", "http://127.0.0.1:1/v1"),
        ("--min-reward", "1"),
        ("--policy", "random", "-n", str(10**30)),
    ],
)
def test_wrong_words_are_told(greetings, words, wording):
    assert play(greetings, "greetings.py", *words, code=2).stderr == wording


def test_a_configuration_is_played_with_calls_in_its_form(tmp_path, typed, wording):
    task = {
        "id": "one",
        "prompt": "Say win.",
        "mcp_config": {"board": {"command": sys.executable, "args": [str(RAW)]}},
        "setup_tool": {"name": "setup"},
        "evaluate_tool": {"name": "evaluate"},
    }
    (tmp_path / "tasks.json").write_text(json.dumps([task]))
    (tmp_path / "gym.yaml").write_text(CONFIG)
    typed('act("win")', "done()")
    out = play(tmp_path, "gym.yaml").stdout
    assert '[assistant]\n<think>I try this.</think><tool>act("win")</tool>\n' in out
    assert out == wording
    said = play(tmp_path, "gym.yaml", "--policy", "random", "--seed", "3", "--json").stdout
    (record,) = [json.loads(line) for line in said.splitlines()]
    calls = [m["content"] for m in record["messages"] if m["role"] == "assistant"]
    assert calls
    assert not record["components"]["tool_errors"]


SCHEMAS = st.recursive(
    st.one_of(
        st.builds(lambda low: {"type": "integer", "minimum": low, "maximum": low + 5}, st.integers(-9, 9)),
        st.builds(lambda least: {"type": "string", "minLength": least}, st.integers(0, 9)),
        st.just({"enum": ["a", 1, None]}),
        st.just({"type": ["boolean", "null"]}),
    ),
    lambda inner: st.one_of(
        st.builds(lambda part: {"type": "array", "items": part, "minItems": 1}, inner),
        st.builds(lambda one, two: {"anyOf": [one, two]}, inner, inner),
        st.builds(
            lambda one, two: {"type": "object", "properties": {"x": one, "y": two}, "required": ["y"]},
            inner,
            inner,
        ),
    ),
    max_leaves=4,
)


@given(SCHEMAS, st.integers())
def test_chance_gives_values_that_fit(schema, seed):
    jsonschema = pytest.importorskip("jsonschema")
    value = random_value(schema, schema, random.Random(seed), ["plum", "7"])
    jsonschema.validate(value, schema)


@pytest.mark.parametrize("value", [True, [{}], "text"])
def test_a_reference_to_something_else_than_an_object_has_an_example(value):
    schema = {"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#/$defs/any"}}}
    schema["$defs"] = {"any": value}
    assert make_example(schema, schema).keys() == {"a"}
    assert random_value(schema, schema, random.Random(0), ["plum"]).keys() == {"a"}


def test_an_object_of_an_old_draft_has_an_example():
    """In draft 3, `required` is a property of each parameter."""
    schema = {"type": "object", "required": True, "properties": {"a": {"type": "string", "required": True}}}
    assert make_example(schema, schema) == {}
    assert random_value(schema, schema, random.Random(0), ["plum"]) in ({}, {"a": "plum"})


@pytest.mark.parametrize("kind", ["integer", "number"])
@given(
    bounds=st.dictionaries(
        st.sampled_from(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]),
        st.one_of(st.integers(-3, 3), st.floats(-3, 3), st.booleans(), st.just("3"), st.just([1])),
    ),
    seed=st.integers(),
)
def test_chance_gives_a_number_whatever_stands_as_a_bound(kind, bounds, seed):
    schema = {"type": kind, **bounds}
    value = random_value(schema, schema, random.Random(seed), ["plum", "7"])
    assert isinstance(value, int | float)


def test_chance_finds_the_number_between_two_that_are_left_out():
    schema = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}
    assert random_value(schema, schema, random.Random(0), ["7"]) == 0.5


def test_words_are_those_that_were_asked_and_answered():
    messages = [
        {"role": "system", "content": "Tools"},
        {"role": "user", "content": "Add 'two plums' to /tmp/a.txt, 3 times."},
        {"role": "assistant", "content": "said"},
        {"role": "tool", "content": "added"},
    ]
    assert conversation_words(messages) == ["Add", "two plums", "to", "/tmp/a.txt", "3", "times", "added"]


@pytest.mark.parametrize("text", ["1, 2, 3", "who=", "who=open('x')", ")("])
def test_a_call_that_cannot_be_read_is_a_value_error(text, refusal):
    with refusal(ValueError):
        read_arguments(text, {"name": "f", "parameters": {"properties": {"who": {}}}})
