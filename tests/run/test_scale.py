"""More inference servers, or fewer, while a run goes on."""

import json
import signal
import threading

import psutil
import pytest

from buckeye.errors import UsageError
from buckeye.runs.stop import scale_run
from tests.waiting import wait_for

from .test_rl import processes_of


def scale(runner, count):
    return runner.run(runner.argv("rl", "scale", "out", "--inference", count))


def servers_up(runner):
    steps = runner.metrics("out", "orchestrator")
    return steps[max(steps)].get("inference/up") if steps else None


def logs(runner):
    return (runner.root / "out" / "logs" / "orchestrator.stdout").read_text()


def titles(runner):
    status = json.loads(runner.run(runner.argv("rl", "status", "out", "--json")).stdout)
    return [each["title"] for each in status["processes"] if each["title"].startswith("inference")]


@pytest.mark.slow
def test_servers_come_and_go_and_no_rollout_is_lost(runner):
    running = runner.start(runner.rl("out", steps=5000))
    printed = []
    reader = threading.Thread(target=lambda: printed.extend(running.stdout), daemon=True)
    reader.start()  # a launcher whose words nobody takes would wait
    wait_for(lambda: servers_up(runner) == 1, "the first step")
    more = scale(runner, 3)
    assert more.returncode == 0, more.stderr
    assert "1 inference servers before, 3 now" in more.stdout
    wait_for(lambda: servers_up(runner) == 3, "three servers play")
    assert scale(runner, 3).stdout.strip().endswith("had 3 inference servers already")
    assert scale(runner, 2).returncode == 0
    wait_for(lambda: servers_up(runner) == 2, "two servers play")
    assert scale(runner, 3).returncode == 0
    wait_for(lambda: servers_up(runner) == 3, "three servers play again")
    again = [p for p in processes_of(runner.root / "out") if "inference_2.json" in " ".join(p.cmdline())]
    psutil.Process(again[-1].pid).kill()
    wait_for(lambda: "is lost" in logs(runner) or "is not used" in logs(runner), "its end is noticed")
    wait_for(lambda: servers_up(runner) == 3, "it is started again")
    fewer = scale(runner, 1)
    assert fewer.returncode == 0, fewer.stderr
    wait_for(lambda: servers_up(runner) == 1, "one is left")
    last = max(runner.metrics("out", "trainer"))
    wait_for(lambda: max(runner.metrics("out", "trainer")) > last + 2, "it goes on")
    wait_for(lambda: titles(runner) == ["inference 0"], "the others have ended")
    running.send_signal(signal.SIGINT)
    assert running.wait() == 130, printed
    reader.join()
    assert sum("Starting it again in" in line for line in printed) == 1  # the one that was killed
    steps = runner.metrics("out", "orchestrator").values()
    assert max(step["inference/up"] for step in steps) == 3
    assert all(step["rollouts/unaccounted"] == 0 for step in steps)
    assert len(json.loads((runner.root / "out" / "run.json").read_text())["attempts"]) == 1
    events = (runner.root / "out" / "events.jsonl").read_text()
    scaled = [json.loads(line)["inference"] for line in events.splitlines() if '"scale"' in line]
    assert scaled == [3, 3, 2, 3, 1]


def test_a_run_that_does_not_go_on_is_not_scaled(finished):
    with pytest.raises(UsageError, match="is finished"):
        scale_run(finished.root / "out", 2)
    asked = finished.here(finished.argv("rl", "scale", "out", "--inference", "0"))
    assert asked.returncode == 2
