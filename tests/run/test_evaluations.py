"""Evaluations of a run: interrupted ones, and the summary at the end."""

import json
import signal

import pytest

from buckeye.base.json_lines import read_json_lines
from buckeye.launch.rl import evaluation_lines
from buckeye.transport.checkpoint import read_scores
from tests.waiting import wait_for

WORDS = ("--orchestrator.eval.env.0.id", "letters.py", "--orchestrator.eval.num-examples", 3)
WORDS += ("--orchestrator.eval.interval", 3, "--ckpt.interval", 1)
SLOW = """import asyncio
        await asyncio.sleep(3.0 if task.id.startswith("eval") else 0.0)
        reply = await"""


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("level", [0, 1])
def test_interrupted_evaluation_is_completed_after_resume(runner, level):
    source = (runner.root / "letters.py").read_text()
    (runner.root / "letters.py").write_text(source.replace("reply = await", SLOW))
    running = runner.start(runner.rl("out", *WORDS, steps=8, level=level))
    log = runner.root / "out" / "logs" / "orchestrator.stdout"
    wait_for(lambda: log.exists() and "Running evals for checkpoint step 3" in log.read_text(), "step 3")
    running.send_signal(signal.SIGINT)
    printed, _ = running.communicate()
    assert running.returncode == 130, printed
    runner.ok(runner.rl("out", *WORDS, "--resume", steps=8, level=level))
    records = read_json_lines(runner.root / "out" / "metrics.jsonl")
    assert [record["step"] for record in records if record["process"] == "eval"] == [0, 3, 6, 8]


def test_evaluation_lines_show_first_and_last_score(tmp_path, wording):
    def evaluate(step, name, **figures):
        folder = tmp_path / "evals" / f"step_{step}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps({"n": 40, **figures}))
        (folder / f"{name}.jsonl").write_text("")

    evaluate(0, "letters", mean_reward=0.1, exact=0.05, ci95=[0.01, 0.2])
    evaluate(10, "letters", mean_reward=0.3, exact=0.2, ci95=[0.1, 0.3])
    evaluate(20, "letters", mean_reward=0.5, exact=0.4, ci95=[0.3, 0.5])
    evaluate(20, "words", mean_reward=0.25)
    evaluate(20, "broken", mean_reward=None)
    assert "\n".join(evaluation_lines(read_scores(tmp_path))) == wording
