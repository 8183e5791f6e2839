"""`rl` from start to end: what it leaves, how it is interrupted, resumed, refused, and how it fails."""

import json
import os
import re
import shlex
import shutil
import signal

import psutil
import pytest

from buckeye.transport.inference_servers import request_restart
from tests.cli.printed_commands import follow
from tests.rounding import logprob_error
from tests.waiting import wait_for


def processes_of(directory):
    """Processes whose command line names a directory."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(str(directory) in word for word in process.info["cmdline"] or []):
            found.append(process)
    return found


def curve(runner, output):
    """Reward, loss and gradient norm of every step, to the last digit."""
    rewards = runner.metrics(output, "orchestrator")
    losses = runner.metrics(output, "trainer")
    return [(s, rewards[s]["reward/mean"], losses[s]["loss"], losses[s]["grad_norm"]) for s in sorted(losses)]


def test_a_run_leaves_what_the_guide_says(finished):
    assert "Step 5/5 | reward" in finished.printed
    shown, _, steps = (finished.root / "out" / "logs" / "run.log").read_text().partition("Step 1")
    assert "The first rollout that is trained on" in shown
    assert re.search(r"^reward +\d", shown, re.M)
    assert not steps or "The first rollout" not in steps
    assert "\x1b" not in finished.printed
    out = finished.root / "out"
    for name in ("orchestrator.stdout", "trainer.stdout", "inference.stdout", "run.log"):
        assert (out / "logs" / name).stat().st_size > 0, name
    assert (out / "weights" / "step_5" / "model.safetensors").exists()
    assert (out / "checkpoints" / "step_5" / "COMMITTED").exists()
    rollouts = [json.loads(x) for x in (out / "rollouts" / "step_3.jsonl").read_text().splitlines()]
    assert len(rollouts) == 16
    assert all(r["error"] is None and r["text"] for r in rollouts)
    assert sorted(finished.metrics("out", "trainer")) == [0, 1, 2, 3, 4]
    assert_on_policy(finished, "out", staleness=0)
    assert not processes_of(out)


def test_a_step_whose_answers_were_nearly_all_cut_off_is_no_success(finished):
    """The model says what it wants in 6 tokens: there is such a step in every run of it."""
    out = finished.root / "out"
    lines = re.findall(
        r"(\w+) Step (\d) \| Time: .* tokens/sample(.*)", (out / "logs/orchestrator.stdout").read_text()
    )
    expected = []
    for step in range(5):
        played = [json.loads(x) for x in (out / "rollouts" / f"step_{step}.jsonl").read_text().splitlines()]
        cut = sum(rollout["truncated"] for rollout in played)
        few = cut < 0.9 * 16
        expected.append(
            ("SUCCESS" if few else "WARNING", str(step), "" if few else f" | Truncated: {cut} of 16")
        )
    assert lines == expected
    assert any(level == "WARNING" for level, _, _ in lines)


def assert_on_policy(runner, output, *, staleness):
    trainer = runner.metrics(output, "trainer").values()
    assert all(r.get("staleness_max", 0) <= staleness for r in trainer)  # none without an advantage
    ages = [r["batch/off_policy_level/max"] for r in runner.metrics(output, "orchestrator").values()]
    assert max(ages) <= staleness
    assert all(abs(r.get("mismatch_kl", 0.0)) < 1e-4 for r in trainer)


def test_interrupted_and_resumed_is_the_same_to_the_last_digit(finished, runner):
    running = runner.start(runner.rl("broken", steps=5, level=0))
    wait_for(lambda: len(runner.metrics("broken", "trainer")) >= 2, "the second step")
    running.send_signal(signal.SIGINT)
    printed, _ = running.communicate()
    assert running.returncode == 130, printed
    assert "--resume" in printed
    assert not processes_of(runner.root / "broken")
    assert len(runner.metrics("broken", "trainer")) < 5
    resumed = runner.run(runner.rl("broken", "--resume", steps=5, level=0))
    assert resumed.returncode == 0, resumed.stderr + resumed.stdout
    assert curve(runner, "broken") == curve(finished, "out")
    weights = "weights/step_5/model.safetensors"
    broken, straight = runner.root / "broken" / weights, finished.root / "out" / weights
    assert broken.read_bytes() == straight.read_bytes()


def test_the_commands_at_the_end_of_a_run_work(finished, runner):
    shutil.copytree(finished.root / "out", runner.root / "out")
    done = follow(runner, f"{finished.printed}\nbuckeye export out\nrl status out\nrl stop out")
    wrong = done.pop("buckeye rl diagnose out")  # its replies are cut off
    assert (wrong.returncode, "1. truncated (likely" in wrong.stdout) == (1, True)
    failed = {command: ended.stderr for command, ended in done.items() if ended.returncode}
    assert failed == {}
    assert done.keys() >= {"buckeye chat out/weights/step_5", "buckeye chat out/exports/step_5"}


def test_a_used_directory_is_refused_with_the_command_to_type(finished):
    before = sorted((finished.root / "out").rglob("*"))
    again = finished.here(finished.rl("out", steps=1))
    assert again.returncode == 2
    assert "--resume" in again.stderr
    assert "Nothing was touched" in again.stderr
    assert sorted((finished.root / "out").rglob("*")) == before


def test_a_run_has_its_directory_alone_and_its_children_end_with_a_launcher_that_is_killed(runner):
    running = runner.start(runner.rl("out", steps=500))
    wait_for(lambda: len(processes_of(runner.root / "out" / "configs")) == 3, "three children")
    second = runner.here(runner.rl("out", "--clean"))
    assert second.returncode == 2
    assert "is in use" in second.stderr
    os.kill(running.pid, signal.SIGKILL)
    running.communicate()
    wait_for(lambda: not processes_of(runner.root / "out"), "the end of all children")
    (runner.root / "out" / "notes.txt").write_text("mine")
    again = runner.run(runner.rl("out", "--clean", steps=1))  # the lock went with the process
    assert again.returncode == 0, again.stderr
    assert (runner.root / "out" / "notes.txt").read_text() == "mine"


def test_an_environment_that_always_fails_is_not_a_reward_of_zero(runner):
    source = (runner.root / "letters.py").read_text()
    (runner.root / "letters.py").write_text(
        source.replace("reply = await", "raise OSError('no such tool')\n        reply = await")
    )
    done = runner.run(runner.rl("out", "--orchestrator.max-empty-batches", 2))
    assert done.returncode == 1
    assert "gave nothing to train on" in done.stderr
    assert not runner.metrics("out", "trainer")
    assert '"restart"' not in (runner.root / "out" / "events.jsonl").read_text()  # no other try can mend it
    played = (runner.root / "out" / "rollouts" / "step_0.dropped.jsonl").read_text().splitlines()
    assert sum(not json.loads(line)["retried"] for line in played) == 2 * 16
    assert len(played) == 2 * 2 * 16  # it fails before the policy is asked, so each is tried again
    assert all(
        one["dropped"] == "errored" and "no such tool" in one["error"] for one in map(json.loads, played)
    )
    assert not (runner.root / "out" / "rollouts" / "step_0.jsonl").exists()
    again = runner.here(runner.rl("out", "--dry-run"))
    assert (again.returncode, "holds a run" in again.stderr) == (0, False), (
        again.stderr
    )  # no step, no obstacle


def test_evaluations_are_interleaved(runner):
    words = ("--orchestrator.eval.env", '[{"id": "letters.py", "num_examples": 6}]')
    words += ("--orchestrator.eval.interval", 2, "--orchestrator.eval.rollouts-per-example", 2)
    done = runner.run(runner.rl("out", *words))
    assert done.returncode == 0, done.stderr
    assert_on_policy(runner, "out", staleness=1)
    evals = runner.metrics("out", "eval")
    assert set(evals) == {0, 2, 4}
    assert all(0 <= r["eval/letters/avg@2"] <= 1 for r in evals.values())
    text = (runner.root / "out" / "logs" / "orchestrator.stdout").read_text()
    assert "Evaluated letters in" in text
    folder = runner.root / "out" / "evals" / "step_4"
    rollouts = [json.loads(line) for line in (folder / "letters.jsonl").read_text().splitlines()]
    assert [(r["task_id"], r["rollout"]) for r in rollouts] == [
        (f"eval-{task}", member) for task in range(6) for member in range(2)
    ]
    assert all([m["role"] for m in r["messages"]] == ["user", "assistant"] for r in rollouts)
    figures = json.loads((folder / "letters.json").read_text())
    assert (figures["step"], figures["id"], figures["n"]) == (4, "letters.py", 12)
    for version in evals:
        path = runner.root / "out" / "evals" / f"step_{version}" / "letters.json"
        assert json.loads(path.read_text())["versions"] == [version]
    assert figures["mean_reward"] == pytest.approx(evals[4]["eval/letters/avg@2"])
    reported = runner.here(runner.argv("rl", "report", "out"))
    assert reported.returncode == 0, reported.stderr
    assert "letters" in (runner.root / "out" / "report.html").read_text()


def test_dry_run_writes_nothing(runner):
    before = sorted(runner.root.rglob("*"))
    done = runner.here(runner.rl("out", "--dry-run", "--inference-gpu-ids", "0,1", "--trainer-gpu-ids", "2"))
    assert done.returncode == 0, done.stderr
    assert "inference 1" in done.stdout
    assert "kept in reserve" in done.stdout  # what it takes of the disk, and what is free
    assert '"max_async_level": 1' in done.stdout
    assert sorted(runner.root.rglob("*")) == before


def test_dry_run_only_warns_about_what_a_start_would_need(runner):
    done = runner.here(
        runner.argv(
            *("rl", "--trainer", "--inference", "--model.name", "nobody/has-this", "--resume"),
            *("--orchestrator.env.0.id", "no-such-env"),
            *("--orchestrator.batch-size", 8, "--orchestrator.rollouts-per-example", 4, "--dry-run"),
        )
    )
    assert done.returncode == 0
    assert "nobody/has-this" in done.stderr
    assert "no-such-env" in done.stderr
    assert "no committed checkpoint" in done.stderr


def test_clean_deletes_nothing_before_the_new_run_can_start(finished):
    before = sorted((finished.root / "out").rglob("*"))
    wrong = finished.here(finished.rl("out", "--clean", "--model.name", "./nowhere"))
    assert wrong.returncode == 2
    own = finished.here(finished.rl("out", "--clean", "--model.name", "out/weights/step_5"))
    assert own.returncode == 2
    assert "starts from" in own.stderr
    assert sorted((finished.root / "out").rglob("*")) == before


def test_clean_does_not_take_folders_that_no_run_made(runner):
    (runner.root / "mine" / "configs").mkdir(parents=True)
    done = runner.here(runner.rl("mine", "--clean"))
    assert done.returncode == 2
    assert "run.json" in done.stderr
    assert (runner.root / "mine" / "configs").exists()


def test_sft_refuses_a_directory_that_holds_a_run(finished):
    (finished.root / "chats.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "say"}, {"role": "assistant", "content": "a"}]}\n'
    )
    words = ("--model.name", finished.model, "--data.path", "chats.jsonl", "--max-steps", 1)
    refused = finished.here(finished.argv("sft", *words, "--output-dir", "out"))
    assert refused.returncode == 2
    assert "already holds a run" in refused.stderr
    assert (finished.root / "out" / "weights" / "step_5").exists()
    fresh = finished.here(finished.argv("sft", *words, "--output-dir", "sft"))
    assert fresh.returncode == 0, fresh.stderr


def test_sft_that_is_stopped_says_how_to_go_on(runner):
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
    program, *resume = shlex.split(printed.partition("Continue with:\n")[2].splitlines()[0])
    assert program == "buckeye"
    done = len(runner.metrics("sft", "sft"))
    went_on = runner.here(runner.argv(*resume, "--max-steps", done + 1))
    assert went_on.returncode == 0, went_on.stderr
    assert len(runner.metrics("sft", "sft")) == done + 1


@pytest.mark.slow
def test_a_run_goes_on_when_an_engine_is_killed(runner):
    words = ("--inference-gpu-ids", "0,1", "--trainer-gpu-ids", "2")
    running = runner.start(runner.rl("out", *words, steps=12))
    wait_for(lambda: len(runner.metrics("out", "trainer")) >= 2, "the second step")
    engine = next(p for p in processes_of(runner.root / "out") if "inference_1.json" in p.cmdline()[-1])
    engine.send_signal(signal.SIGKILL)
    printed, _ = running.communicate()
    assert running.returncode == 0, printed
    assert "Inference 1 was ended by SIGKILL" in printed
    assert "Starting it again in 1 s (restart 1 of at most 5" in printed
    assert sorted(runner.metrics("out", "trainer")) == list(range(12))
    steps = runner.metrics("out", "orchestrator")
    assert all(m["rollouts/errored"] == 0 for m in steps.values())
    assert steps[11]["inference/1/failures"] == 1
    assert steps[11]["inference/0/failures"] == 0
    assert max(m["canary/max_diff"] for m in steps.values()) < logprob_error(layers=1, width=192)


@pytest.mark.slow
def test_an_engine_that_is_not_right_is_started_anew(runner):
    running = runner.start(runner.rl("out", steps=500))
    wait_for(lambda: runner.metrics("out", "trainer"), "the first step")
    (engine,) = [p for p in processes_of(runner.root / "out") if "serve" in p.cmdline()]
    request_restart(runner.root / "out", base_url(runner, "out"), "it sings another song")
    wait_for(lambda: not engine.is_running(), "the end of the engine")
    last = max(runner.metrics("out", "trainer"))
    wait_for(lambda: max(runner.metrics("out", "trainer")) > last + 2, "further steps")
    restarts = max(m["inference/0/restarts"] for m in runner.metrics("out", "orchestrator").values())
    running.send_signal(signal.SIGINT)
    printed, _ = running.communicate()
    assert running.returncode == 130, printed
    assert "inference 0 is ended to be started anew: it sings another song" in printed
    assert restarts == 1


def base_url(runner, output):
    """Where the first engine of a run answers."""
    config = json.loads((runner.root / output / "configs" / "orchestrator.json").read_text())
    return config["client"]["base_url"][0].removesuffix("/v1")
