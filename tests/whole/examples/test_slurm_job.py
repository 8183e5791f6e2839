"""The example job of Slurm."""

import os
import signal
import subprocess
import time

from tests.places import ROOT

SCRIPT = ROOT / "examples" / "slurm" / "job.sh"


def start(tmp_path, python, nodes=2):
    (tmp_path / "python").write_text(f"#!/bin/bash\n{python}\n")
    (tmp_path / "scontrol").write_text(f'#!/bin/bash\necho "$@" > {tmp_path}/scontrol.log\n')
    for name in ("python", "scontrol"):
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": str(nodes)}
    env = {
        **os.environ,
        **job,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "OUTPUT_DIR": str(tmp_path / "run"),
    }
    words = ["bash", SCRIPT, "@", "run.toml"]
    return subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True, cwd=tmp_path)


def test_it_starts_a_run_on_its_nodes_and_resumes_one_that_is_there(tmp_path):
    command = f"-m buckeye rl @ run.toml --output-dir {tmp_path}/run"
    out, _ = start(tmp_path, 'echo "$@"; exit 3').communicate(timeout=30)
    assert out.splitlines()[1:] == [f"{command} --cluster.nodes 2 --cluster.engine srun"]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").touch()
    job = start(tmp_path, 'echo "$@"; exit 3', nodes=1)
    out, _ = job.communicate(timeout=30)
    assert out.splitlines()[1:] == [f"{command} --resume"]
    assert job.returncode == 3
    assert not (tmp_path / "scontrol.log").exists()


def test_before_its_time_is_over_the_run_is_stopped_and_the_job_queued_again(tmp_path):
    python = (
        f'if [ "$4" = stop ]; then touch {tmp_path}/stopped; exit; fi\n'
        f"touch {tmp_path}/started; while [ ! -e {tmp_path}/stopped ]; do sleep 0.05; done; exit 130"
    )
    job = start(tmp_path, python)
    deadline = time.monotonic() + 30
    while not (tmp_path / "started").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    job.send_signal(signal.SIGUSR1)
    job.communicate(timeout=30)
    assert (tmp_path / "scontrol.log").read_text() == "requeue 7\n"
