"""`buckeye.train` as a user calls it: a function of the script is the reward, and a killed script resumes."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

import buckeye
from buckeye.errors import UsageError
from buckeye.run_files.record import read_record
from buckeye.trainer.model.tiny import TinySize, make_tiny_model
from tests.waiting import HANG

pytestmark = pytest.mark.e2e

SCRIPT = """
import sys
import buckeye

rows = [{"prompt": f"say {n}", "wanted": "a"} for n in range(40)]

def letters(completion, wanted, **row):
    return completion[:3].count(wanted) / 3

settings = {
    "max_steps": int(sys.argv[2]), "seq_len": 128, "ckpt": {"interval": 2},
    "orchestrator": {"batch_size": 8, "rollouts_per_example": 4, "sampling": {"max_tokens": 4}},
}
if sys.argv[1] == "train":
    run = buckeye.train("model", dataset=rows, reward=letters, output_dir="run", **settings)
else:
    run = buckeye.open_run("run").resume(reward=letters)
print("ended:", run.state, run.model.name, len(list(run.rollouts())))
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("script")
    texts = [f"say {n} aaa bbb" for n in range(40)]
    make_tiny_model(folder / "model", texts=texts, size=TinySize(vocab_size=300, layers=1, hidden=64), seed=0)
    (folder / "script.py").write_text(SCRIPT)
    return folder


def start(project, *words):
    return subprocess.Popen(
        [sys.executable, "script.py", *words],
        cwd=project,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_step(project, step):
    deadline = time.monotonic() + HANG
    file = project / "run" / "metrics.jsonl"
    while time.monotonic() < deadline:
        lines = file.read_text().splitlines() if file.exists() else []
        steps = [json.loads(line)["step"] for line in lines if '"process": "trainer"' in line]
        if steps and max(steps) >= step:
            return
        time.sleep(0.1)
    raise AssertionError(f"no step {step} within {HANG} s")


def wait_until_ended(project):
    deadline = time.monotonic() + HANG
    while read_record(project / "run").actual_state() in ("starting", "running", "stopping"):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
def test_killed_script_resumes_and_loses_nothing(project):
    script = start(project, "train", "30")
    wait_for_step(project, 4)
    script.send_signal(signal.SIGKILL)
    script.wait()
    wait_until_ended(project)
    record = read_record(project / "run")
    assert record.actual_state() == "stopped"
    left = [
        p
        for p in psutil.process_iter(["cmdline"])
        if str(project / "run") in " ".join(p.info["cmdline"] or ())
    ]
    assert left == []
    run = buckeye.open_run(project / "run")
    done = len(run.metrics())

    again = start(project, "resume", "30")
    printed, _ = again.communicate(timeout=HANG)
    assert again.returncode == 0, printed
    assert "ended: finished step_30" in printed
    steps = [row["step"] for row in map(dict, buckeye.open_run(project / "run").metrics())]
    assert steps[:30] == list(range(30))
    assert done >= 4
    assert os.path.exists(project / "run" / "caller.json")


def test_refused_start_raises_its_error_and_leaves_no_folder(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": "say 1"}, {"prompt": "say 2"}]
    with pytest.raises(UsageError) as refused:
        buckeye.train("./missing", dataset=rows, reward=lambda completion: 1.0, output_dir="run")
    assert refused.value.code == "BK-MODEL-NOT-FOUND"
    assert str(refused.value).startswith("./missing does not exist")
    assert capfd.readouterr() == ("", "")
    assert not (tmp_path / "run").exists()
