"""A run that is ended in the middle of an evaluation."""

import signal

import pytest

from buckeye.base.json_lines import read_json_lines
from tests.waiting import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

WORDS = ("--orchestrator.eval.env.0.id", "letters.py", "--orchestrator.eval.num-examples", 3)
WORDS += ("--orchestrator.eval.interval", 3, "--ckpt.interval", 1)
SLOW = """import asyncio
        await asyncio.sleep(3.0 if task.id.startswith("eval") else 0.0)
        reply = await"""


@pytest.mark.parametrize("level", [0, 1])
def test_a_run_that_is_ended_in_an_evaluation_repeats_and_leaves_out_none(runner, level):
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
