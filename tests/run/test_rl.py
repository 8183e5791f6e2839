"""`rl` from start to end: results, interruption, resume, refusals and failures."""

import json
import os
import re
import shlex
import shutil
import signal

import pytest

from buckeye.launch.changed_settings import settings_history
from buckeye.monitor.metrics import RECORD_KEYS
from buckeye.run_files.events import read_events
from buckeye.runs.stop import continuation
from tests.cli.printed_commands import follow
from tests.run.conftest import processes_of
from tests.waiting import wait_for
from tests.whole.docs.reference_tool import reference


@pytest.mark.e2e
@pytest.mark.smoke
def test_run_compares_forecast_with_first_three_trained_steps(finished):
    log = (finished.root / "out" / "logs" / "run.log").read_text()
    steps = [step for step in finished.metrics("out", "trainer").values() if step["tokens_computed"]][:3]
    events = [e for e in read_events(finished.root / "out") if e["event"] == "forecast"]
    assert len(events) == log.count("Forecast of a trainer step: ") == log.count("Measured in 3 steps: ")
    assert len(events) == (len(steps) == 3)
    for event in events:
        assert event["measured_seconds"] == round(sorted(step["seconds"] for step in steps)[1], 4)
        assert event["forecast_seconds"] > 0.03


@pytest.mark.e2e
@pytest.mark.smoke
def test_run_writes_documented_files(finished):
    assert "Step 5/5 | reward" in finished.printed
    shown, _, _ = finished.printed.partition("Step 1/5")
    assert re.search(r"^reward +\d", shown, re.M)
    assert "\x1b" not in finished.printed
    out = finished.root / "out"
    for name in ("orchestrator.stdout", "trainer.stdout", "inference.stdout", "run.log"):
        assert (out / "logs" / name).stat().st_size > 0, name
    assert (out / "weights" / "step_5" / "model.safetensors").exists()
    assert (out / "checkpoints" / "step_5" / "COMMITTED").exists()
    rollouts = finished.rollouts("out", 3)
    assert len(rollouts) == 16
    assert all(r["error"] is None and r["text"] for r in rollouts)
    assert sorted(finished.metrics("out", "trainer")) == [0, 1, 2, 3, 4]
    assert_on_policy(finished, "out", staleness=0)
    assert not processes_of(out)


@pytest.mark.e2e
@pytest.mark.parametrize("process", ["trainer", "orchestrator", "checkpoint"])
def test_every_metric_of_a_run_is_documented(finished, process):
    names = {name for record in finished.metrics("out", process).values() for name in record} - set(
        RECORD_KEYS
    )
    assert names
    assert reference.unknown_metrics(process, names) == set()


def assert_on_policy(runner, output, *, staleness):
    trainer = runner.metrics(output, "trainer").values()
    assert all(r.get("staleness_max", 0) <= staleness for r in trainer)  # else without an advantage
    ages = [r["batch/off_policy_level/max"] for r in runner.metrics(output, "orchestrator").values()]
    assert max(ages) <= staleness
    assert all(abs(r.get("mismatch_kl", 0.0)) < 1e-4 for r in trainer)


@pytest.mark.e2e
def test_resumed_run_equals_uninterrupted_run(finished, runner):
    running = runner.start(runner.rl("broken", steps=5, level=0))
    wait_for(lambda: len(runner.metrics("broken", "trainer")) >= 2, "the second step")
    running.send_signal(signal.SIGINT)
    printed, _ = running.communicate()
    assert running.returncode == 130, printed
    assert "--resume" in printed
    assert not processes_of(runner.root / "broken")
    assert len(runner.metrics("broken", "trainer")) < 5
    runner.ok(runner.rl("broken", "--resume", steps=5, level=0))
    assert runner.curve("broken") == finished.curve("out")
    weights = "weights/step_5/model.safetensors"
    broken, straight = runner.root / "broken" / weights, finished.root / "out" / weights
    assert broken.read_bytes() == straight.read_bytes()


@pytest.mark.e2e
@pytest.mark.smoke
def test_resume_that_is_stopped_early_records_its_flags(finished, runner):
    out = runner.root / "out"
    shutil.copytree(finished.root / "out", out)
    running = runner.start(runner.argv("rl", "resume", "out", "--max-steps", 60))
    starts = '"attempt": 2, "process": "trainer 0"'
    wait_for(lambda: starts in (out / "events.jsonl").read_text(), "the start of the trainer")
    running.send_signal(signal.SIGINT)
    printed, _ = running.communicate()
    assert running.returncode == 130, printed
    assert len(runner.metrics("out", "trainer")) == 5
    assert " ".join(continuation(out, []).arguments).count("--max-steps 60") == 1
    history = [(change.key, change.old, change.new) for change in settings_history(out)]
    assert history == [("trainer.max_steps", 5, 60)]


@pytest.mark.e2e
def test_commands_printed_at_end_of_run_work(finished, runner):
    shutil.copytree(finished.root / "out", runner.root / "out")
    done = follow(runner, f"{finished.printed}\nbuckeye export out\nrl status out\nrl stop out")
    wrong = done.pop("buckeye rl diagnose out")
    assert (wrong.returncode, "First broken link: untrained (likely" in wrong.stdout) == (1, True)
    failed = {command: ended.stderr for command, ended in done.items() if ended.returncode}
    assert failed == {}
    assert done.keys() >= {"buckeye chat out/weights/step_5", "buckeye chat out/exports/step_5"}


@pytest.mark.e2e
def test_run_locks_its_directory_and_children_end_with_launcher(runner):
    running = runner.start(runner.rl("out", steps=500))
    wait_for(lambda: len(processes_of(runner.root / "out" / "configs")) == 3, "three children")
    second = runner.here(runner.rl("out", "--clean"))
    assert second.returncode == 2
    os.kill(running.pid, signal.SIGKILL)
    running.communicate()
    wait_for(lambda: not processes_of(runner.root / "out"), "the end of all children")
    (runner.root / "out" / "notes.txt").write_text("mine")
    again = runner.run(runner.rl("out", "--clean", steps=1))  # the lock ended with the process
    assert again.returncode == 0, again.stderr
    assert (runner.root / "out" / "notes.txt").read_text() == "mine"


@pytest.mark.e2e
def test_run_with_failing_environment_fails(runner):
    source = (runner.root / "letters.py").read_text()
    (runner.root / "letters.py").write_text(
        source.replace("reply = await", "raise OSError('unplugged')\n        reply = await")
    )
    done = runner.run(runner.rl("out", "--orchestrator.max-empty-batches", 2))
    assert done.returncode == 1
    assert not runner.metrics("out", "trainer")
    assert '"restart"' not in (runner.root / "out" / "events.jsonl").read_text()  # a retry cannot fix it
    played = (runner.root / "out" / "rollouts" / "step_0.dropped.jsonl").read_text().splitlines()
    assert sum(not json.loads(line)["retried"] for line in played) == 2 * 16
    assert len(played) == 2 * 2 * 16  # it fails before the policy's first request, so each is retried
    assert all(one["dropped"] == "errored" and "unplugged" in one["error"] for one in map(json.loads, played))
    assert not (runner.root / "out" / "rollouts" / "step_0.jsonl").exists()
    again = runner.here(runner.rl("out", "--dry-run"))
    assert (again.returncode, "has a run" in again.stderr) == (0, False), (
        again.stderr
    )  # no step was made, so the directory is free


def test_run_without_tracker_key_is_refused(runner):
    runner.env |= {"NETRC": "none", "WANDB_API_KEY": ""}
    refused = runner.here(runner.rl("out", "--wandb"))
    assert refused.returncode == 2
    assert "  at wandb" in refused.stderr.splitlines()
    assert not (runner.root / "out").exists()


def test_clean_keeps_folders_of_third_parties(runner):
    (runner.root / "mine" / "configs").mkdir(parents=True)
    done = runner.here(runner.rl("mine", "--clean"))
    assert done.returncode == 2
    assert "run.json" in done.stderr
    assert (runner.root / "mine" / "configs").exists()


@pytest.mark.e2e
def test_stopped_sft_prints_resume_command(runner):
    (runner.root / "chats.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "say"}, {"role": "assistant", "content": "a"}]}\n'
    )
    words = (
        "--model.name",
        runner.model,
        "--data.path",
        "chats.jsonl",
        "--output-dir",
        "sft",
        "--ckpt.interval",
        1,
    )
    running = runner.start(runner.argv("sft", *words, "--max-steps", 5000))
    wait_for(lambda: len(runner.metrics("sft", "sft")) >= 2, "the second step")
    running.send_signal(signal.SIGINT)
    printed, _ = running.communicate()
    assert running.returncode == 130, printed
    program, *resume = shlex.split(printed.partition("To resume:\n")[2].splitlines()[0])
    assert program == "buckeye"
    done = len(runner.metrics("sft", "sft"))
    went_on = runner.here(runner.argv(*resume, "--max-steps", done + 1))
    assert went_on.returncode == 0, went_on.stderr
    assert len(runner.metrics("sft", "sft")) == done + 1
    assert f"model: sft/weights/step_{done + 1} | chat: " in went_on.stdout + went_on.stderr
