"""`buckeye eval` as a user runs it."""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from buckeye.base import terminal
from buckeye.dataset.environment import load_environment
from buckeye.envs import chat_server as client
from buckeye.evaluation import run_eval
from buckeye.trainer.model.tiny import TinySize, make_tiny_model
from tests.command import run_here
from tests.evaluation.chat_server import chat_server
from tests.run.made_runs import made_run
from tests.small_disk import small_disk
from tests.waiting import wait_for

ENVIRONMENT = """
from buckeye.envs.base import Outcome, Task


class Numbers:
    name = "numbers"

    def tasks(self, split):
        if split != "train":
            raise KeyError(split)
        return [
            Task(id=f"n{n}", messages=({"role": "user", "content": f"Say {n}."},), data={"n": n})
            for n in range(4)
        ]

    async def rollout(self, task, policy):
        reply = await policy.chat(task.messages)
        right = float(reply.text == str(task.data["n"]))
        components = {"length": len(reply.text), "turns": 9}
        return Outcome(reward=right, components=components, stop_reason="answered")


def load_environment():
    return Numbers()
"""


NOWHERE = ("--model", "m", "--base-url", "http://127.0.0.1:9/v1")


@pytest.fixture
def environment(tmp_path):
    path = tmp_path / "numbers.py"
    path.write_text(ENVIRONMENT)
    return str(path)


def command(environment, tmp_path, *words):
    out = ("--output-dir", str(tmp_path / "out"))
    return [sys.executable, "-m", "buckeye", "eval", environment, *out, *words]


def evaluate(environment, tmp_path, *words, code=0, **variables):
    argv = command(environment, tmp_path, *words)
    tmp_path.mkdir(exist_ok=True)
    done = run_here(*argv[3:], cwd=tmp_path, env={**os.environ, **variables})
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def rows(tmp_path):
    return [json.loads(line) for line in (tmp_path / "out" / "rollouts.jsonl").read_text().splitlines()]


def number_of(body):
    return int(body["messages"][-1]["content"].split()[1].rstrip("."))


def test_figures_by_hand(environment, tmp_path):
    """Task 0 is always solved, task 1 in one of two rollouts, tasks 2 and 3 never.

    Mean reward and pass@1 are (1 + 1/2) / 4, and pass@2 is 2 / 4.
    """
    seen = []

    def answer(body, _):
        n = number_of(body)
        seen.append(n)
        return "0" if n == 0 else "1" if n == 1 and seen.count(1) == 1 else "no"

    with chat_server(answer) as (url, requests):
        done = evaluate(
            environment, tmp_path, "--base-url", url, "--model", "m", "-r", "2", "--temperature", "0.5",
            "--max-tokens", "9", "--json", OPENAI_API_KEY="the-secret-key",
        )  # fmt: skip
    report = json.loads(done.stdout)
    assert (report["tasks"], report["scored"], report["errored"], report["split"]) == (4, 8, 0, "train")
    assert report["reward"]["value"] == report["pass@1"]["value"] == 0.375
    assert report["pass@2"]["value"] == 0.5
    assert 0.0 <= report["pass@2"]["low"] < 0.5 < report["pass@2"]["high"] <= 1.0
    assert report["means"]["length"] == (1 + 1 + 1 + 2 + 2 + 2 + 2 + 2) / 8
    assert report["means"]["completion_tokens"] == 3.0
    assert (report["means"]["turns"], report["means"]["component/turns"]) == (1.0, 9.0)
    assert report["stop_reasons"] == {"answered": 8}
    headers, body = requests[0]
    assert headers["Authorization"] == "Bearer the-secret-key"
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("m", 0.5, 9)
    assert "seed" not in body
    played = rows(tmp_path)
    assert sorted((row["task_id"], row["rollout"]) for row in played) == [
        (f"n{n}", r) for n in range(4) for r in range(2)
    ]
    assert played[0]["messages"][-1]["role"] == "assistant"
    everything = "".join(path.read_text() for path in (tmp_path / "out").iterdir())
    assert "the-secret-key" not in everything + done.stdout + done.stderr


def test_a_full_reward_that_is_rounded_down_passes(environment, tmp_path):
    """0.7 + 0.2 + 0.1 is 0.9999999999999999."""
    Path(environment).write_text(ENVIRONMENT.replace("reward=right", "reward=right * (0.7 + 0.2 + 0.1)"))
    with chat_server(lambda body, _: "0") as (url, _):
        done = evaluate(environment, tmp_path, "--base-url", url, "--model", "m", "--json")
    assert json.loads(done.stdout)["pass@1"]["value"] == 0.25


def test_rollouts_of_a_repeated_task_count_once(environment, tmp_path):
    Path(environment).write_text(ENVIRONMENT.replace("range(4)", "(0, 1, 1)"))
    with chat_server(lambda body, _: "0") as (url, _):
        done = evaluate(environment, tmp_path, "--base-url", url, "--model", "m", "-r", "2", "--json")
    report = json.loads(done.stdout)
    assert (report["tasks"], report["scored"], report["pass@2"]["value"]) == (2, 4, 0.5)
    assert report["tokens"]["completion"] == 12


def test_words_and_endpoints_of_verifiers_are_known(environment, tmp_path):
    (tmp_path / "configs").mkdir()
    table = tmp_path / "configs" / "endpoints.toml"
    argv = ["eval", environment, "-m", "small", "--num-examples", "2", "--rollouts-per-example", "3"]
    argv += ["-c", "1", "-t", "9", "-T", "0.5", "-a", "{}", "-o", "results", "--json"]
    with chat_server(lambda body, _: "1") as (url, requests):
        entry = f'endpoint_id = "small"\nmodel = "served"\nurl = "{url}"\nkey = "MY_KEY"\n'
        table.write_text(f'[[endpoint]]\nendpoint_id = "other"\n\n[[endpoint]]\n{entry}')
        done = run_here(*argv, cwd=tmp_path, env={**os.environ, "MY_KEY": "the-key"})
    assert done.returncode == 0, done.stderr
    assert (json.loads(done.stdout)["tasks"], len(requests)) == (2, 6)
    headers, body = requests[0]
    assert headers["Authorization"] == "Bearer the-key"
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("served", 9, 0.5)
    assert (tmp_path / "results" / "rollouts.jsonl").exists()
    (tmp_path / "small").mkdir()  # a local model with the name of the endpoint
    done = run_here(*argv, cwd=tmp_path)
    assert (done.returncode, "BK-CLI-CONFLICT" in done.stderr) == (2, True)
    table.write_text('[[endpoint]]\nendpoint_id = "small"\nmodel = "served"\n')
    done = run_here(*argv, cwd=tmp_path)
    assert (done.returncode, "BK-CLI-ARGUMENT" in done.stderr) == (2, True)


def test_several_environments_are_evaluated_and_resumed(environment, tmp_path):
    """The second environment fails to load at first. Prices are dollars per million tokens."""
    (tmp_path / "configs").mkdir()
    other = tmp_path / "other.py"
    argv = ["eval", "numbers.py", "other.py", "-m", "small", "-n", "2", "-o", "results", "--json"]
    with chat_server(lambda body, _: "1") as (url, requests):
        (tmp_path / "configs" / "endpoints.toml").write_text(
            f'[[endpoint]]\nendpoint_id = "small"\nmodel = "served"\nurl = "{url}"\n'
            "input_price = 1e6\noutput_price = 2e6\n"
        )
        other.write_text("raise RuntimeError('not yet')")
        assert run_here(*argv, cwd=tmp_path).returncode == 2
        misspelled = run_here(*argv[:2], "othr.py", *argv[3:], cwd=tmp_path)
        assert (misspelled.returncode, "othr.py" in misspelled.stderr) == (2, True)
        twice = run_here(*argv[:2], "./numbers.py", *argv[3:], cwd=tmp_path)
        assert (twice.returncode, "BK-CLI-CONFLICT" in twice.stderr) == (2, True)
        assert (requests, (tmp_path / "results").exists()) == ([], False)
        other.write_text(ENVIRONMENT.replace('"numbers"', '"other"'))
        assert run_here(*argv, cwd=tmp_path).returncode == 0
        done = run_here(*argv, "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)["evaluations"]
    assert len(requests) == 4
    assert [one["reward"]["value"] for one in (first, second)] == [0.5, 0.5]
    assert {path.name for path in (tmp_path / "results").iterdir()} == {
        "numbers.py-served",
        "other.py-served",
    }
    for report in (first, second):
        assert report["tokens"]["completion"] > 0
        assert report["cost"] == report["tokens"]["prompt"] + 2 * report["tokens"]["completion"]


@pytest.mark.parametrize(("flags", "names"), [((), {"c", "d"}), (("--split", "train"), {"a", "b"})])
def test_dataset_with_a_reward_is_evaluated_on_its_test_split(tmp_path, flags, names):
    for split, letters in {"train": "ab", "test": "cd"}.items():
        rows = [{"prompt": name, "answer": name.upper()} for name in letters]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "reward.py").write_text("def score(completion, answer):\n    return completion == answer\n")
    argv = ["eval", "--dataset", ".", "--reward", "reward.py", "--model", "m", "--json", *flags]
    with chat_server(lambda body, _: "C") as (url, requests):
        done = run_here(*argv, "--base-url", url, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {body["messages"][-1]["content"] for _, body in requests} == names
    assert json.loads(done.stdout)["reward"]["value"] == (0.0 if "--split" in flags else 0.5)


def test_one_file_without_splits_is_evaluated_whole(tmp_path):
    rows = [{"prompt": f"Say {n}.", "answer": f"{n}"} for n in range(20)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    argv = ["eval", "--dataset", "prompts.jsonl", "--reward", "exact", "--model", "m", "--json"]
    with chat_server(lambda body, _: str(number_of(body))) as (url, requests):
        done = run_here(*argv, "--base-url", url, cwd=tmp_path)
    assert (done.returncode, len(requests)) == (0, 20), done.stderr


def test_columns_of_a_dataset_can_be_named(tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"ask": "Say 1.", "want": "1"}')
    argv = ["eval", "--dataset", "prompts.jsonl", "--reward", "exact", "--model", "m", "--json"]
    argv += ["--prompt-column", "ask", "--answer-column", "want"]
    with chat_server(lambda body, _: str(number_of(body))) as (url, _):
        done = run_here(*argv, "--base-url", url, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["reward"]["value"] == 1.0


def test_training_data_that_cannot_be_read_is_reported(tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Say 1.", "answer": "1"}')
    config = made_run(tmp_path / "run") / "configs" / "rl.json"
    env = {"id": "dataset", "args": {"path": "deleted.jsonl", "reward": ["exact"]}}
    config.write_text(json.dumps({"orchestrator": {"env": [env]}}))
    (tmp_path / "run" / "weights" / "step_1").mkdir(parents=True)
    argv = ["eval", "--dataset", "prompts.jsonl", "--reward", "exact", "--model", "run/weights/step_1"]
    with chat_server(lambda body, _: "1") as (url, _):
        done = run_here(*argv, "--json", "--base-url", url, cwd=tmp_path)
    (note,) = json.loads(done.stdout)["notes"]
    assert "deleted.jsonl" in note


@pytest.mark.parametrize("origin", ["command", "Python"])
def test_rows_that_the_run_of_the_model_trained_on_are_counted_and_can_be_left_out(tmp_path, origin):
    rows = [{"prompt": f"Say {n}.", "answer": f"{n}"} for n in range(20)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    held_out = load_environment(str(tmp_path / "prompts.jsonl"), "exact").tasks("eval")
    config = made_run(tmp_path / "run") / "configs" / "rl.json"
    env = {"id": "dataset", "args": {"path": "prompts.jsonl", "reward": ["exact"]}}
    if origin == "Python":
        env = {"id": "caller", "args": {}}
        (tmp_path / "run" / "caller.json").write_text(json.dumps({"dataset": rows, "eval_dataset": None}))
    config.write_text(json.dumps({"orchestrator": {"env": [env]}}))
    (tmp_path / "run" / "weights" / "step_1").mkdir(parents=True)
    argv = ["eval", "--dataset", "prompts.jsonl", "--reward", "exact", "--model", "run/weights/step_1"]
    argv += ["--json"]
    with chat_server(lambda body, _: str(number_of(body))) as (url, requests):
        whole = run_here(*argv, "--base-url", url, cwd=tmp_path)
        requests.clear()
        part = run_here(*argv, "--base-url", url, "--split", "eval", "--output-dir", "out", cwd=tmp_path)
    (note,) = json.loads(whole.stdout)["notes"]
    assert f"{20 - len(held_out)} of 20 tasks are training tasks of" in note
    assert json.loads(part.stdout)["notes"] == []
    sent = {body["messages"][-1]["content"] for _, body in requests}
    assert sent == {task.messages[0]["content"] for task in held_out}


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--dataset", "d.jsonl"), "BK-CLI-MISSING"),
        (("--reward", "r.py"), "BK-CLI-MISSING"),
        (("letters", "--reward", "r.py", "--dataset", "d.jsonl"), "BK-CLI-CONFLICT"),
        (("letters", "--prompt-column", "p"), "BK-CLI-CONFLICT"),
    ],
)
def test_dataset_and_reward_belong_together(tmp_path, words, code):
    done = run_here("eval", *words, "--model", "m", cwd=tmp_path)
    assert (done.returncode, code in done.stderr) == (2, True), done.stderr


def test_the_table(environment, tmp_path, wording):
    with chat_server(lambda body, _: str(number_of(body))) as (url, _):
        done = evaluate(environment, tmp_path, "--base-url", url, "--model", "m", "-n", "3")
    lines = done.stdout.splitlines()
    assert lines[3].split()[:2] == ["reward", "1.0000"]
    assert [line for line in lines if line.startswith(("note", "stop reasons"))] == wording


def test_rewards_of_a_group_are_those_of_the_whole_group(environment, tmp_path):
    """The reward is a reply's excess over the group's mean.

    If one rollout is missing, the group runs again.
    """
    in_groups = """
    async def rollout_in_group(self, task, policy):
        reply = await policy.chat(task.messages)
        return Outcome(reward=None, components={"said": float(reply.text)}, pending="later")

    async def finish_group(self, task, outcomes):
        mean = sum(outcome.components["said"] for outcome in outcomes) / len(outcomes)
        return [Outcome(reward=o.components["said"] - mean, components=o.components) for o in outcomes]
"""
    (tmp_path / "numbers.py").write_text(ENVIRONMENT.replace("\n\ndef load", f"{in_groups}\n\ndef load"))
    with chat_server(lambda body, n: str(n)) as (url, requests):
        words = ("--base-url", url, "--model", "m", "-n", "2", "-r", "2", "--max-concurrent", "1", "--json")
        evaluate(environment, tmp_path, *words)
        played = rows(tmp_path)
        assert {(row["task_id"], row["rollout"]): row["reward"] for row in played} == {
            ("n0", 0): -0.5, ("n0", 1): 0.5, ("n1", 0): -0.5, ("n1", 1): 0.5,
        }  # fmt: skip
        kept = [row for row in played if (row["task_id"], row["rollout"]) != ("n1", 0)]
        path = tmp_path / "out" / "rollouts.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in kept))
        report = json.loads(evaluate(environment, tmp_path, *words, "--resume").stdout)
    assert len(requests) == 6
    assert (report["scored"], report["errored"]) == (4, 0)


MESSAGE = {"role": "assistant", "content": "0 and so on and"}
CUT = (200, json.dumps({"choices": [{"message": MESSAGE, "finish_reason": "length"}]}))
NOTES = {
    "all answers cut off": (lambda body, _: CUT if number_of(body) else (400, "no"), ()),
    "nearly all errored": (lambda body, number: "1" if number == 1 else (400, "no"), ("-r", "3")),
}


@pytest.mark.parametrize("what", NOTES)
def test_unreliable_figures_have_a_note(environment, tmp_path, what, wording):
    answer, words = NOTES[what]
    with chat_server(answer) as (url, _):
        words = ("--base-url", url, "--model", "m", "--retries", "0", "--max-concurrent", "1", *words)
        done = evaluate(environment, tmp_path, *words)
    assert [line for line in done.stdout.splitlines() if line.startswith("note: ")] == wording


@pytest.mark.parametrize(
    ("content", "usage", "reward"),
    [
        ([{"type": "text", "text": "1"}, {"type": "text", "text": "2"}], {"completion_tokens": 3}, 1.0),
        ([{"type": "image_url", "image_url": {}}], None, None),
        ("12", {"prompt_tokens": "5", "completion_tokens": -1}, 1.0),
        ("12", [], 1.0),
    ],
)
def test_unusual_replies_of_a_server_are_read_or_are_its_errors(
    environment, tmp_path, content, usage, reward
):
    Path(environment).write_text(ENVIRONMENT.replace("range(4)", "[12]"))
    choice = {"message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
    with chat_server(lambda *_: (200, json.dumps({"choices": [choice], "usage": usage}))) as (url, _):
        words = ("--base-url", url, "--model", "m", "--retries", "0")
        evaluate(environment, tmp_path, *words, code=int(reward is None))
    (row,) = rows(tmp_path)
    assert row.get("reward") == reward
    assert (row["error"] or "InferenceError").startswith("InferenceError")
    assert row["completion_tokens"] == (3 if isinstance(usage, dict) and content != "12" else 0)


def test_server_without_credit_is_not_retried(environment, tmp_path):
    with chat_server(lambda *_: (429, '{"error": {"code": "insufficient_quota"}}')) as (url, requests):
        evaluate(environment, tmp_path, "--base-url", url, "--model", "m", "--retries", "0", code=1)
    assert len(requests) == 4


def test_busy_server_is_retried(environment, tmp_path):
    with chat_server(lambda body, n: (503, "busy") if n == 1 else str(number_of(body))) as (url, requests):
        evaluate(environment, tmp_path, "--base-url", url, "--model", "m", "--max-concurrent", "1")
    assert len(requests) == 5


def test_silent_server_is_shown(environment, tmp_path, monkeypatch):
    monkeypatch.setattr(run_eval, "SILENT_SECONDS", 0.1)
    monkeypatch.setattr(terminal, "FIRST_LINE", 0.05)

    def answer(body, _):
        time.sleep(1.0 if number_of(body) == 3 else 0.0)
        return str(number_of(body))

    with chat_server(answer) as (url, _):
        done = evaluate(environment, tmp_path, "--base-url", url, "--model", "m", "--timeout", "60")
    assert "3 of 4 rollouts; none has ended for " in done.stderr


def test_errors_are_counted_and_have_no_reward(environment, tmp_path):
    def answer(body, _):
        return (400, "bad request") if number_of(body) == 2 else str(number_of(body))

    with chat_server(answer) as (url, _):
        done = evaluate(environment, tmp_path, "--base-url", url, "--model", "m", "--json")
    report = json.loads(done.stdout)
    assert (report["scored"], report["errored"], report["reward"]["value"]) == (3, 1, 1.0)
    assert "bad request" in next(iter(report["errors"]))
    assert [row["reward"] for row in rows(tmp_path) if row["task_id"] == "n2"] == [None]


@pytest.mark.parametrize(
    ("reply", "field"),
    [
        ({"choices": [{"message": {"content": 5}}]}, "message.content"),
        ({"choices": [{"message": {"reasoning": ["a"]}}]}, "message.reasoning"),
        ({"choices": [{"message": {"tool_calls": [{"function": "f"}]}}]}, "message.tool_calls[0].function"),
        ({"choices": []}, "choices"),
    ],
)
def test_reply_with_a_wrong_type_is_an_error_of_the_server(environment, tmp_path, reply, field):
    def answer(body, _):
        return (200, json.dumps(reply)) if number_of(body) == 2 else str(number_of(body))

    with chat_server(answer) as (url, _):
        done = evaluate(environment, tmp_path, "--base-url", url, "--model", "m", "--json")
    (error,) = json.loads(done.stdout)["errors"]
    assert error.startswith("InferenceError: ")
    assert f".{field}`" in error


def test_text_of_the_model_and_the_environment_cannot_control_the_terminal(environment, tmp_path):
    with chat_server(lambda *_: (400, "\x1b[2J broken")) as (url, _):
        done = evaluate(environment, tmp_path, "--base-url", url, "--model", "m", code=1)
    assert "\\x1b[2J broken" in done.stderr
    assert "\x1b" not in done.stderr
    path = tmp_path / "raising.py"
    path.write_text(ENVIRONMENT.replace("right = ", 'assert task.data["n"], reply.text\n        right = '))
    with chat_server(lambda *_: "\x1b[2J") as (url, _):
        argv = command(str(path), tmp_path / "2", "--base-url", url, "--model", "m")
        done = subprocess.run(argv, capture_output=True, text=True)
    assert "\\x1b[2J" in done.stdout
    assert "\\x1b[2J" in done.stderr
    assert "\x1b" not in done.stdout + done.stderr


def test_resume_runs_only_missing_or_errored_rollouts(environment, tmp_path, wording):
    def broken(body, _):
        return (400, "bad request") if number_of(body) == 2 else str(number_of(body))

    with chat_server(broken) as (url, _):
        words = ("--base-url", url, "--model", "m", "--json")
        evaluate(environment, tmp_path, *words, "-n", "3")
        again = evaluate(environment, tmp_path, *words, code=2)
        assert "--resume" in again.stderr
        other = evaluate(environment, tmp_path, *words, "--resume", "--temperature", "0.1", code=2)
        assert other.stderr == wording
    path = tmp_path / "out" / "rollouts.jsonl"
    path.write_bytes(path.read_bytes() + b'{"task_id": "n3", "roll')  # killed while writing
    with chat_server(lambda body, _: str(number_of(body))) as (url, requests):
        done = evaluate(environment, tmp_path, "--base-url", url, "--model", "m", "--json", "--resume")
    assert sorted(number_of(body) for _, body in requests) == [2, 3]
    assert len(rows(tmp_path)) == 5  # the truncated line is gone, and the errored rollout has two lines
    report = json.loads(done.stdout)
    assert (report["scored"], report["errored"], report["reward"]["value"]) == (4, 0, 1.0)


def test_resume_keeps_a_row_that_lacks_only_its_newline(environment, tmp_path):
    path = tmp_path / "out" / "rollouts.jsonl"
    with chat_server(lambda body, _: str(number_of(body))) as (url, requests):
        words = ("--base-url", url, "--model", "m", "--max-concurrent", "1")
        evaluate(environment, tmp_path, *words)
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]).rstrip(b"\n"))
        evaluate(environment, tmp_path, *words, "--resume")
    assert [number_of(body) for _, body in requests] == [0, 1, 2, 3, 2, 3]
    assert [row["task_id"] for row in rows(tmp_path)] == ["n0", "n1", "n2", "n3"]


def test_directory_with_an_evaluation_is_refused_before_anything_is_loaded(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "settings.json").write_text("{}")
    refused = evaluate("no-such-environment", tmp_path, *NOWHERE, code=2)
    assert "BK-FILE-EXISTS" in refused.stderr


@pytest.mark.e2e
@pytest.mark.smoke
def test_interrupted_evaluation_keeps_finished_rollouts(environment, tmp_path, wording):
    over = threading.Event()

    def answer(body, _):
        if number_of(body) == 3:
            over.wait()
        return str(number_of(body))

    with chat_server(answer) as (url, _):
        words = ("--base-url", url, "--model", "m")
        process = subprocess.Popen(command(environment, tmp_path, *words), stderr=subprocess.PIPE, text=True)
        wait_for(lambda: (tmp_path / "out" / "rollouts.jsonl").exists() and len(rows(tmp_path)) == 3)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate()
        over.set()
    assert process.returncode == 130
    assert said == wording
    assert sorted(row["task_id"] for row in rows(tmp_path)) == ["n0", "n1", "n2"]


@pytest.mark.parametrize(("status", "code"), [(401, "BK-KEY-INVALID"), (404, "BK-INFERENCE-REQUEST")])
def test_refused_request_ends_the_evaluation(environment, tmp_path, status, code, caplog):
    with chat_server(lambda body, _: (status, "no")) as (url, _):
        done = evaluate(environment, tmp_path, "--base-url", url, "--model", "m", code=2)
    assert f"replied with {status}" in done.stderr
    assert code in done.stderr
    gc.collect()
    assert [record for record in caplog.records if record.name == "asyncio"] == []


def test_unreachable_address_ends_the_evaluation_within_seconds(environment, tmp_path, monkeypatch, wording):
    waits = client._WAITS
    assert sum(waits[: client._CONNECT_ATTEMPTS - 1]) <= 10.0
    monkeypatch.setattr(client, "_WAITS", tuple(0.0 for _ in waits))
    done = evaluate(environment, tmp_path, *NOWHERE, "--retries", "3", code=2)
    assert done.stderr == wording


def test_full_disk_is_reported(environment, tmp_path, wording):
    with small_disk(tmp_path / "out", size=64 * 1024), chat_server(lambda *_: "x" * 40_000) as (url, _):
        done = evaluate(environment, tmp_path, "--base-url", url, "--model", "m", code=1)
        assert done.stderr == wording


@pytest.mark.parametrize(
    "words",
    [(), ("--model", "m", "--base-url", "localhost:8000"), (*NOWHERE, "--split", "test"), NOWHERE],
    ids=["no model", "no address", "no such split", "a folder that is used"],
)
def test_invalid_arguments_are_refused(environment, tmp_path, words, wording):
    (tmp_path / "out").mkdir()
    if words == NOWHERE:
        (tmp_path / "out" / "thesis.txt").write_text("mine")
    assert evaluate(environment, tmp_path, *words, code=2).stderr == wording


def test_lone_surrogate_does_not_end_the_evaluation(environment, tmp_path):
    """Neither in a reply, which the next turn contains, nor in the environment's texts about it."""
    twice = ENVIRONMENT.replace(
        "reply = await policy.chat(task.messages)",
        "reply = await policy.chat(task.messages)\n"
        "        reply = await policy.chat((*task.messages, reply.message, task.messages[0]))",
    ).replace('"answered"', '"answered \\udfff"')
    (tmp_path / "numbers.py").write_text(twice)
    with chat_server(lambda *_: "a \ud800 b") as (url, _):
        evaluate(environment, tmp_path, "--base-url", url, "--model", "m", "-n", "2")
    assert [row["error"] for row in rows(tmp_path)] == [None] * 2
    for row in rows(tmp_path):
        assert row["messages"][-1]["content"] == "a \ufffd b"
        assert row["stop_reason"] == "answered \ufffd"
    for path in (tmp_path / "out").iterdir():
        assert "\\ud" not in path.read_text(encoding="utf-8")


AGENT = """
import json, os, sys, urllib.request

task = json.load(open(os.environ["BUCKEYE_TASK"]))
body = {"model": "any", "messages": task["messages"], "logprobs": True, "max_tokens": 4}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
request = urllib.request.Request(url, json.dumps(body).encode(), headers)
told = json.load(urllib.request.urlopen(request))["choices"][0]["logprobs"]["content"]
assert all(one["logprob"] <= 0.0 for one in told)
print(json.dumps({"reward": 1.0, "components": {"tokens": len(told)}}))
"""


@pytest.mark.slow
def test_agent_program_gets_log_probs_from_a_local_model(tmp_path):
    size = TinySize(vocab_size=310, layers=1, hidden=64, max_length=128)
    make_tiny_model(tmp_path / "model", texts=["say 1 2 3"] * 20, size=size, seed=0)
    (tmp_path / "agent.py").write_text(AGENT)
    tasks = [{"id": str(n), "prompt": f"Say {n}."} for n in range(2)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    args = {"command": ["python", str(tmp_path / "agent.py")], "tasks": str(tmp_path / "tasks.jsonl")}
    done = evaluate(
        "agent", tmp_path, "--args", json.dumps(args), "--model", str(tmp_path / "model"), "--json"
    )
    report = json.loads(done.stdout)
    assert (report["scored"], report["errored"], report["reward"]["value"]) == (2, 0, 1.0)
    assert 1 <= report["means"]["tokens"] <= 4


def test_wrong_model_is_refused_before_the_environment_is_loaded(tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    codes = {"broken": "BK-MODEL-DAMAGED", "./missing": "BK-MODEL-NOT-FOUND", "a/b/c": "BK-MODEL-NOT-FOUND"}
    for model, code in codes.items():
        done = run_here("eval", "no-such-environment", "--model", model, cwd=tmp_path)
        assert (done.returncode, code in done.stderr) == (2, True), done.stderr
