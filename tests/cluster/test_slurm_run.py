"""A run on a real Slurm of two nodes."""

import sys

import pytest

from tests.cluster.conftest import STEPS
from tests.cluster.hosts import needs_hosts, some_hosts, wait_until
from tests.cluster.project import attempts, records, result
from tests.cluster.slurm import needs_slurm, slurm
from tests.places import ROOT

pytestmark = [needs_hosts, needs_slurm, pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(3600)]

LOG = "buckeye-%j.log"
_JOB_SECONDS = 1500


@pytest.fixture
def cluster(tmp_path):
    with some_hosts() as (first, second), slurm(tmp_path / "slurm", first, second) as running:
        yield first, second, running


def submit(project, running, name, *more):
    env = {**project.env, "PATH": running.env["PATH"], "PYTHON": sys.executable}
    env["OUTPUT_DIR"] = str(project.folder / "outputs" / name)
    asked = ("--nodes=2", "--partition=main", "--time=02:00:00", "--gres=none", f"--output={LOG}")
    words = (
        "sbatch",
        "--parsable",
        *asked,
        ROOT / "examples" / "slurm" / "job.sh",
        "@",
        f"{name}.toml",
        *more,
    )
    return running.run(*words, cwd=project.folder, env=env).strip()


def ended(running, job):
    return running.state(job) in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def test_slurm_job_is_requeued_after_loss_of_a_node(project, single_host, cluster):
    _, second, running = cluster
    output = project.write("requeued", trainers=[1], cluster="[cluster]\nnodes = 2\ninference_nodes = [0]\n")
    job = submit(project, running, "requeued")
    wait_until(lambda: 1 in records(output, "trainer"), _JOB_SECONDS, "two steps")
    second.kill()
    wait_until(lambda: running.state(job) in ("PENDING", "REQUEUED"), 900, "the job waits again")
    running.start_node(second)
    wait_until(lambda: ended(running, job), _JOB_SECONDS, "the job ends")
    log = (project.folder / f"buckeye-{job}.log").read_text()
    assert running.state(job) == "COMPLETED", log
    assert log.count("== job ") == 2
    assert attempts(output)[-1]["resumed_step"] is not None
    assert result(output, STEPS) == single_host


def test_slurm_job_checkpoints_before_its_time_limit(project, cluster):
    _, _, running = cluster
    output = project.write("warned", trainers=[1], cluster="[cluster]\nnodes = 2\ninference_nodes = [0]\n")
    job = submit(project, running, "warned", "--max-steps", 200)  # enough steps that it is not done before
    wait_until(lambda: 1 in records(output, "trainer"), _JOB_SECONDS, "two steps")
    running.run("scancel", "--batch", "--signal=USR1", job)  # as Slurm does with --signal=B:USR1@...
    wait_until(lambda: running.state(job) in ("PENDING", "REQUEUED"), 900, "the job waits again")
    wait_until(lambda: ended(running, job), _JOB_SECONDS, "the job ends")
    log = (project.folder / f"buckeye-{job}.log").read_text()
    assert running.state(job) == "COMPLETED", log
    assert log.count("== job ") == 2
    assert attempts(output)[-1]["resumed_step"] >= 1
    assert sorted(records(output, "trainer")) == list(range(200))
