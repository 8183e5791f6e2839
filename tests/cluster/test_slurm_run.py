"""A run on a real Slurm of two nodes."""

import sys

import pytest

from tests.cluster.conftest import STEPS
from tests.cluster.hosts import needs_hosts, some_hosts, wait_until, words_of
from tests.cluster.project import attempts, records, result
from tests.cluster.slurm import needs_slurm, slurm

pytestmark = [needs_hosts, needs_slurm, pytest.mark.slow, pytest.mark.timeout(3600)]

SECRET = "hf_abcdefghijklmnopqrstuvwxyz"
_JOB_SECONDS = 1500


@pytest.fixture
def cluster(tmp_path):
    with some_hosts() as (first, second), slurm(tmp_path / "slurm", first, second) as running:
        yield first, second, running


def submit(project, running, name, *more, **variables):
    words = ("--launcher", "slurm", "--cpus", 1, "--partition", "main", "--time", "2h", *more)
    env = {**project.env, "HF_TOKEN": SECRET, "PATH": running.env["PATH"], **variables}
    said = running.run(*project.argv("rl", "@", f"{name}.toml", *words), cwd=project.folder, env=env)
    return said.partition("Submitted job ")[2].partition(".")[0]


APPTAINER = """#!/bin/bash
[ "$1" = exec ] || exit 9
shift
while [ "${1#--}" != "$1" ]; do shift; done
[ "$1" = run.sif ] || exit 9
shift
export IN_CONTAINER=1
exec "$@"
"""
"""It enters nothing, and says so to who asks."""


def ended(running, job):
    return running.state(job) in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def test_a_job_of_two_nodes_gives_the_result_of_one_host(project, single_host, cluster):
    _, second, running = cluster
    output = project.write("slurm", trainers=[1], cluster="[cluster]\nnodes = 2\ninference_nodes = [0]\n")
    job = submit(project, running, "slurm")
    wait_until(lambda: 1 in records(output, "trainer"), _JOB_SECONDS, "two steps")
    running.run("sbatch", "--test-only", output / "slurm" / "job.sh")
    assert len([pid for pid in second.processes() if "buckeye worker trainer" in words_of(pid)]) == 1
    wait_until(lambda: ended(running, job), _JOB_SECONDS, "the job ends")
    log = (output / "slurm" / "job.log").read_text()
    assert running.state(job) == "COMPLETED", log
    assert result(output, STEPS) == single_host
    assert not (output / "slurm" / "keys").exists()
    assert SECRET not in (output / "slurm" / "job.sh").read_text() + log
    assert not [pid for pid in second.processes() if "buckeye" in words_of(pid)]


def test_a_node_that_dies_has_the_job_queued_again_and_resumed(project, single_host, cluster):
    _, second, running = cluster
    output = project.write("requeued", trainers=[1], cluster="[cluster]\nnodes = 2\ninference_nodes = [0]\n")
    job = submit(project, running, "requeued")
    wait_until(lambda: 1 in records(output, "trainer"), _JOB_SECONDS, "two steps")
    second.kill()
    wait_until(lambda: running.state(job) in ("PENDING", "REQUEUED"), 900, "the job waits again")
    running.start_node(second)
    wait_until(lambda: ended(running, job), _JOB_SECONDS, "the job ends")
    log = (output / "slurm" / "job.log").read_text()
    assert running.state(job) == "COMPLETED", log
    assert log.count("== job ") == 2
    assert attempts(output)[-1]["resumed_step"] is not None
    assert result(output, STEPS) == single_host


def test_before_its_time_is_over_a_job_checkpoints_and_is_queued_again(project, cluster):
    _, _, running = cluster
    output = project.write("warned", trainers=[1], cluster="[cluster]\nnodes = 2\ninference_nodes = [0]\n")
    job = submit(project, running, "warned", "--max-steps", 200)  # or it might be done before
    wait_until(lambda: 1 in records(output, "trainer"), _JOB_SECONDS, "two steps")
    running.run("scancel", "--batch", "--signal=USR1", job)  # as Slurm does by --signal=B:USR1@...
    wait_until(lambda: running.state(job) in ("PENDING", "REQUEUED"), 900, "the job waits again")
    assert (output / "slurm" / "keys").exists()
    wait_until(lambda: ended(running, job), _JOB_SECONDS, "the job ends")
    log = (output / "slurm" / "job.log").read_text()
    assert running.state(job) == "COMPLETED", log
    assert log.count("== job ") == 2
    assert attempts(output)[-1]["resumed_step"] >= 1
    assert sorted(records(output, "trainer")) == list(range(200))
    assert not (output / "slurm" / "keys").exists()


def test_samplers_and_trainers_are_components_of_one_job(project, single_host, cluster):
    _, second, running = cluster
    nodes = "[cluster]\nnodes = 2\ninference_nodes = [0]\ntrainer_nodes = [1]\n"
    output = project.write("components", trainers=[1, 2], cluster=nodes)
    job = submit(project, running, "components", "--inference-partition", "main")
    wait_until(lambda: 1 in records(output, "trainer"), _JOB_SECONDS, "two steps")
    running.run("sbatch", "--test-only", output / "slurm" / "job.sh")
    assert len([pid for pid in second.processes() if "buckeye worker trainer" in words_of(pid)]) == 2
    wait_until(lambda: ended(running, job), _JOB_SECONDS, "the job ends")
    log = (output / "slurm" / "job.log").read_text()
    assert running.state(job) == "COMPLETED", log
    assert result(output, STEPS) == single_host


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_run_in_containers(project, single_host, cluster, tmp_path, nodes):
    """The container is a stand-in: this shows where the commands go, and that the run gets through."""
    _, second, running = cluster
    shared = "[cluster]\nnodes = 2\ninference_nodes = [0]\n" if nodes == 2 else ""
    output = project.write(f"container{nodes}", trainers=[1] if nodes == 2 else [1, 2], cluster=shared)
    bin = tmp_path / "bin"
    bin.mkdir()
    for name, text in (("apptainer", APPTAINER), ("python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')):
        (bin / name).write_text(text)
        (bin / name).chmod(0o755)
    inside = {"PATH": f"{bin}:{running.env['PATH']}"}
    job = submit(project, running, f"container{nodes}", "--apptainer", "run.sif", **inside)
    wait_until(lambda: ended(running, job), _JOB_SECONDS, "the job ends")
    log = (output / "slurm" / "job.log").read_text()
    assert running.state(job) == "COMPLETED", log
    assert result(output, STEPS) == single_host
    wait_until(lambda: not [pid for pid in second.processes() if "ray" in words_of(pid)], 60, "Ray has ended")
