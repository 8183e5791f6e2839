"""Commands on a dataset with a reward: evaluate it, and check it."""

import json
from pathlib import Path

from tests.command import run_here
from tests.dataset.conftest import ROWS
from tests.evaluation.chat_server import chat_server

REWARD = """
def reward(completions, answer, **columns):
    return [float(c == a) for c, a in zip(completions, answer)]
"""


def answer(body, number):
    first = body["messages"][-1]["content"].split()[2]
    return str(2 * int(first))


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
    assert set(rows[0]["data"]) == {"row", "is_text", "at"}


def test_a_dataset_passes_the_checks_of_environments(write, tmp_path):
    args = ["--arg", f"path={write('prompts.jsonl', ROWS)}", "--arg", "reward=numeric"]
    done = run_here("env", "check", "dataset", *args, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    results = {check["name"]: check["status"] for check in json.loads(done.stdout)["checks"]}
    assert results["accepted answers are rewarded"] == "pass"
