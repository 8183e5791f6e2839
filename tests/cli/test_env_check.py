"""`buckeye env check` as a person calls it."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buckeye.cli.env_args import environment_args
from buckeye.errors import UsageError
from tests.command import run_here

TOY = str(Path(__file__).parents[1] / "envs" / "toy.py")


def check(*words):
    return run_here("env", "check", *words, cwd=".")


def test_an_honest_environment_ends_with_0_and_plain_text():
    argv = [sys.executable, "-m", "buckeye", "env", "check", TOY]
    done = subprocess.run(argv, capture_output=True, text=True, encoding="utf-8", timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["check", "result"]
    assert any(line.startswith("probes ") and " pass " in line for line in lines)
    assert any(line.startswith("spread within groups") and "not run" in line for line in lines)
    assert lines[-1].startswith("toy: 12 passed, 0 failed, 1 not run")
    assert done.stderr == ""
    assert "\x1b" not in done.stdout


def test_a_failing_check_ends_with_1_and_says_why():
    done = check(TOY, "--arg", "variant=wrong probe")
    assert done.returncode == 1
    assert "1 of 2 wrong, as 'right': got 1, not 0.5" in done.stdout
    assert "Wrong probes" in done.stdout


def test_json_is_one_object_on_stdout():
    done = check(TOY, "--args", '{"variant": "echo", "size": 40}', "--json")
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert report["splits"] == {"train": 40, "eval": 40}
    assert [c["name"] for c in report["checks"] if c["status"] == "fail"] == [
        "content-free policies below 0.03"
    ]
    assert report["checks"][-1] == {
        "name": "spread within groups",
        "status": "not run",
        "detail": "give a model: --model PATH_OR_NAME",
    }


def test_the_limit_and_the_sample_are_options():
    done = check(TOY, "--arg", "variant=echo", "--max-content-free", "0.2", "--sample", "40", "--json")
    assert done.returncode == 0
    assert {score["tasks"] for score in json.loads(done.stdout)["content_free"]} == {40}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["dakota1980"], "Did you mean dakota1890?"),
        (["nowhere/toy.py"], "the path does not exist"),
        ([TOY, "--arg", "varient=echo"], "takes no argument 'varient'. Did you mean 'variant'?"),
        ([TOY, "--arg", "variant"], "write NAME=VALUE"),
        ([TOY, "--args", "[1]"], "--args is a JSON object"),
        ([TOY, "--args", "{"], "--args is not JSON"),
        ([TOY, "--model", "nowhere/model", "--sample", "5"], "nowhere/model"),
    ],
)
def test_wrong_usage_ends_with_2(words, message, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = check(*words)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("true", True),
        ("null", None),
        ("rule", "rule"),
        ("a,b", ["a", "b"]),
        ("a,", ["a"]),
        ('"a,b"', "a,b"),
        ('["a"]', ["a"]),
        ("a=b", "a=b"),
        ("", ""),
    ],
)
def test_an_argument_is_json_a_list_or_text(text, value):
    assert environment_args([f"name={text}"], None) == {"name": value}


def test_single_arguments_win_over_the_object():
    assert environment_args(["a=2"], '{"a": 1, "b": 1}') == {"a": 2, "b": 1}


@given(st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.text(), max_size=4))
def test_any_json_object_is_taken_as_it_is(args):
    assert environment_args([], json.dumps(args)) == args


@given(st.text(), st.text())
def test_any_text_gives_arguments_or_a_usage_error(pair, text):
    with contextlib.suppress(UsageError):
        assert isinstance(environment_args([pair], text or None), dict)
