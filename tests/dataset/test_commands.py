"""Commands on a dataset with a reward: evaluate it, and check it."""

import json
from pathlib import Path

import pytest

from tests.command import run_here
from tests.dataset.conftest import ROWS
from tests.evaluation.chat_server import chat_server
from tests.run.made_runs import made_run

REWARD = """
def reward(completions, answer, **columns):
    return [float(c == a) for c, a in zip(completions, answer)]
"""


def answer(body, number):
    first = body["messages"][-1]["content"].split()[2]
    return str(2 * int(first))


def test_the_environment_of_a_run_is_checked(write, tmp_path):
    write("prompts.jsonl", ROWS)
    write("reward.py", REWARD)
    run = made_run(tmp_path / "outputs" / "checked", working_directory=str(tmp_path))
    env = {"id": "dataset", "args": {"path": "prompts.jsonl", "reward": ["reward.py"]}, "ratio": 1.0}
    (run / "configs").mkdir(exist_ok=True)
    (run / "configs" / "rl.json").write_text(json.dumps({"orchestrator": {"env": [env]}}))
    done = run_here("env", "check", "checked", "--json", cwd=tmp_path / "outputs")
    assert done.stderr == ""
    assert done.returncode == 0
    (run / "configs" / "rl.json").write_text(json.dumps({"orchestrator": {"env": [env, env]}}))
    done = run_here("env", "check", "checked", cwd=tmp_path)
    assert done.returncode == 2
    assert "buckeye env check --dataset prompts.jsonl --reward reward.py" in done.stderr


def test_a_model_of_a_server_is_evaluated(write, tmp_path):
    args = ["--arg", f"path={write('prompts.jsonl', ROWS)}", "--arg", f"reward={write('reward.py', REWARD)}"]
    with chat_server(answer) as (url, _):
        words = [
            "--model",
            "m",
            "--base-url",
            url,
            "--split",
            "train",
            "--output-dir",
            "out",
            "-r",
            2,
            "--json",
        ]
        done = run_here("eval", "dataset", *args, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in Path("out/rollouts.jsonl").read_text().splitlines()]
    assert {row["reward"] for row in rows} == {1.0}
    assert rows[0]["components"] == {"reward": 1.0}
    assert set(rows[0]["data"]) == {"row", "is_text", "at", "answer"}


def test_a_dataset_passes_the_checks_of_environments(write, tmp_path):
    args = ["--arg", f"path={write('prompts.jsonl', ROWS)}", "--arg", "reward=numeric"]
    done = run_here("env", "check", "dataset", *args, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    results = {check["name"]: check["status"] for check in json.loads(done.stdout)["checks"]}
    assert results["accepted answers are rewarded"] == "pass"


def answer_check(write, tmp_path, reward, *flags, rows=ROWS):
    """Return the result of the check of accepted answers, of one call of `env check`."""
    if "def " in reward:
        reward = write("scored.py", f"import re\n{reward}")
    args = ["--dataset", write("prompts.jsonl", rows), "--reward", reward, *flags, "--json"]
    done = run_here("env", "check", *args, cwd=tmp_path)
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert done.returncode == (1 if any(check["status"] == "error" for check in checks.values()) else 0)
    return checks["accepted answers are rewarded"]


BOXED = r"""def reward(completions, answer, **row):
    found = [re.search(r"boxed\{(.*)\}", text) for text in completions]
    return [-1.0 if match is None else 5.0 * (match[1] == right) for match, right in zip(found, answer)]
"""
REWARDS = {
    "right": ("def reward(completion, answer): return 0.2 * (completion.strip() == answer)", "pass", None),
    "in a usual format, with another scale": (BOXED, "pass", None),
    "of a penalty": ("def reward(completion, answer): return -1.0 * (completion != answer)", "pass", None),
    "always zero": ("def reward(completion, answer): return float(completion == 1)", "error", "ZERO"),
    "negated": ("def reward(completion, answer): return -float(completion == answer)", "error", "SIGN"),
    "constant": ("def reward(completion, answer): return 0.7", "error", "CONSTANT"),
    "of the length": ("def reward(completion, answer): return len(completion) / 100", "error", "CONSTANT"),
    "without answers": ("def reward(completion, **row): return len(completion) / 100", "not run", None),
    "by the row": (
        "def reward(completion, **row): return -float(row['answer'] in completion)",
        "error",
        "SIGN",
    ),
    "sometimes": (
        "def reward(completion, answer): return float(completion == answer != '8')",
        "warning",
        "ZERO",
    ),
}


def test_check_and_play_take_the_columns_of_a_dataset(write, tmp_path):
    rows = [{"ask": f"Say {number}.", "want": f"{number}"} for number in range(12)]
    columns = ("--prompt-column", "ask", "--answer-column", "want")
    assert answer_check(write, tmp_path, "exact", *columns, rows=rows)["status"] == "pass"
    args = ("--dataset", "prompts.jsonl", "--reward", "exact", *columns, "--policy", "random")
    assert run_here("env", "play", *args, cwd=tmp_path).returncode == 0


@pytest.mark.parametrize("kind", REWARDS)
def test_check_compares_rewards_of_right_and_wrong_answers(write, tmp_path, wording, kind):
    reward, status, code = REWARDS[kind]
    result = answer_check(write, tmp_path, reward)
    assert (result["status"], result["code"]) == (status, code and f"BK-REWARD-{code}")
    assert result["detail"] == wording


@pytest.mark.parametrize("answers", ["lists of numbers", "lists of texts", "booleans", "numbers"])
def test_check_tries_every_accepted_answer_of_a_built_in_reward(write, tmp_path, answers):
    values = {
        "lists of numbers": lambda n: [2 * n, 2 * n + 0.5],
        "lists of texts": lambda n: [str(2 * n), f"= {2 * n}"],
        "booleans": lambda n: n % 2 == 0,
        "numbers": lambda n: 2 * n,
    }
    rows = [{"prompt": f"What is {n} plus {n}?", "answer": values[answers](n)} for n in range(4)]
    result = answer_check(write, tmp_path, "exact", rows=rows)
    count = 8 if answers.startswith("lists") else 4
    assert (result["status"], result["detail"].split()[0]) == ("pass", str(count))


@pytest.mark.parametrize("reward", ["exact", "by_answer.py"])
@pytest.mark.parametrize(
    "command", ["env check", "eval --model m --base-url http://127.0.0.1:9", "rl --dry-run --model tiny"]
)
def test_row_without_an_answer_is_refused_once_and_by_every_command(write, tmp_path, command, reward):
    write("prompts.jsonl", [*ROWS, {"prompt": "What is 20 plus 20?", "answer": None}])
    write("by_answer.py", "def reward(completion, answer): return float(completion == answer)")
    words = [*command.split(), "--dataset", "prompts.jsonl", "--reward", reward]
    done = run_here(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert "BK-DATA-FORMAT" in done.stderr
    assert "  at prompts.jsonl:21\n" in done.stderr
