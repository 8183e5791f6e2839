"""`buckeye env check` as a user runs it."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.command import run_here
from tests.places import ROOT

from buckeye.cli.env_options import environment_config
from buckeye.errors import UsageError
from buckeye.evaluation.environment_args import environment_args

TOY = str(ROOT / "tests" / "envs" / "toy.py")


def check(*words):
    return run_here("env", "check", *words, cwd=".")


def test_an_honest_environment_ends_with_0_and_plain_text():
    done = check(TOY)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["check", "result"]
    assert any(line.startswith("probes ") and " pass " in line for line in lines)
    assert lines[-1].startswith("toy: 0 errors, 0 warnings, 0 notes, 12 passed,")
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("nemo-gym", "check"),
        ("nemo-gym", "install"),
        ("gymnasium/CartPole-v1", "check"),
    ],
)
def test_a_library_that_has_no_adapter_is_answered_with_what_can_be_done(name, command, wording):
    done = run_here("env", command, name, cwd=".")
    assert done.returncode == 2
    assert done.stderr == wording


def test_a_failing_check_ends_with_1_and_says_why():
    done = check(TOY, "--arg", "variant=wrong probe")
    assert done.returncode == 1
    assert "1 of 2 wrong; for example 'right': got 1, expected 0.5" in done.stdout
    assert "Wrong probes" in done.stdout
    assert "toy: 1 error, 0 warnings, 0 notes," in done.stdout


def test_warnings_end_with_0_unless_strict_and_json_says_how_bad_each_is():
    words = [TOY, "--args", '{"variant": "echo", "size": 60}', "--json"]
    assert check(*words, "--strict").returncode == 1
    done = check(*words)
    assert done.returncode == 0
    report = json.loads(done.stdout)
    assert report["splits"] == {"train": 60, "eval": 60}
    assert {c["name"]: c["status"] for c in report["checks"] if c["status"] not in ("pass", "not run")} == {
        "content-free policies": "warning"
    }
    assert (report["errors"], report["warnings"], report["notes"], report["passed"]) == (0, 1, 0, True)


def test_the_limit_and_the_sample_are_options():
    words = ["--arg", "variant=echo", "--max-content-free", "0.2", "--sample", "40", "--strict", "--json"]
    done = check(TOY, *words)
    assert done.returncode == 0
    assert {score["tasks"] for score in json.loads(done.stdout)["content_free"]} == {20, 40}


def test_what_the_budget_is_too_short_for_is_said():
    done = check(TOY, "--arg", "variant=slow", "--budget", "1")
    assert done.returncode == 0
    assert "(--budget)" in done.stdout


@pytest.mark.parametrize(
    "words",
    [
        ["dakota1980"],
        ["nowhere/toy.py"],
        [TOY, "--arg", "varient=echo"],
        [TOY, "--arg", "variant"],
        [TOY, "--args", "[1]"],
        [TOY, "--args", "{"],
    ],
    ids=["environment", "path", "argument", "form", "array", "json"],
)
def test_wrong_usage_ends_with_2(words, monkeypatch, wording):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = check(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == wording


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


def test_an_argument_given_twice_is_refused():
    with pytest.raises(UsageError) as error:
        environment_args(["reward=a.py", "reward=b.py"], None)
    assert error.value.code == "BK-CLI-ARGUMENT"


def test_a_file_of_rl_init_is_an_argument_of_the_mcp_environment():
    config = environment_config("configs/server.yaml", None, None, {}, [])
    assert config.id == "mcp"
    assert (config.args["config_path"], config.args["dataset"]) == ("configs/server.yaml", "tasks.json")
    assert environment_config("mcp", "other.json", None, {}, []).args == {"dataset": "other.json"}
    assert environment_config("dakota1890", None, None, {"split": "eval"}, []).args == {"split": "eval"}
    written = environment_config(None, "a.jsonl", ["exact"], {"split": "test"}, [])
    assert written.args == {"path": "a.jsonl", "reward": ["exact"], "split": "test"}


@given(st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.text(), max_size=4))
def test_any_json_object_is_taken_as_it_is(args):
    assert environment_args([], json.dumps(args)) == args


@given(st.text(), st.text())
def test_any_text_gives_arguments_or_a_usage_error(pair, text):
    with contextlib.suppress(UsageError):
        assert isinstance(environment_args([pair], text or None), dict)
