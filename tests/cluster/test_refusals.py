"""What is said on real clusters where a run cannot be: one message, and nothing is left."""

import shutil
import subprocess
import tomllib
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.cluster.hosts import needs_hosts, some_hosts, wait_until
from tests.cluster.ray import ray_cluster
from tests.cluster.slurm import needs_slurm, slurm
from tests.cluster.test_ray_run import CLUSTER, SECONDS, left, start
from tests.cluster.test_slurm_run import ended, submit
from tests.places import ROOT

pytestmark = [needs_hosts, pytest.mark.slow, pytest.mark.timeout(3600)]

OTHER = "3.12"
LEAD = """
import sys
from buckeye.config.load import load_config
from buckeye.config.rl import RLConfig
from buckeye.errors import UsageError
from buckeye.launch.engines.ray_cluster import ray_nodes

words = ["@", "python.toml", "--cluster.engine", "ray", "--cluster.ray-address", sys.argv[1]]
try:
    with ray_nodes(load_config(RLConfig, words)):
        pass
except UsageError as error:
    print(f"error: {error}")
    sys.exit(2)
"""
"""What `rl` does first with its nodes, without torch, which that environment lacks."""


@pytest.fixture(scope="module")
def another_python():
    """The folder of an environment with Buckeye in another Python."""
    program = next(filter(runs, (f"python{OTHER}", *pyenvs())), None)
    if program is None:
        pytest.skip(f"needs python{OTHER}")
    folder = ROOT / ".cache" / "venvs" / "another-python"
    if not (folder / "done").exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([program, "-m", "venv", folder], check=True)
        needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
        pip = (folder / "bin" / "python", "-m", "pip", "install", "-q")
        subprocess.run([*pip, *needed, f"ray=={version('ray')}"], check=True)
        (folder / "done").touch()
    (site,) = folder.glob("lib/python*/site-packages")
    sources = [ROOT / "src", *ROOT.glob("packages/*/src")]
    (site / "ours.pth").write_text("".join(f"{source}\n" for source in sources))
    return folder


def pyenvs():
    """The programs of that Python which pyenv has: its `python3.12` in PATH may be a script that fails."""
    return (str(path) for path in Path.home().glob(f".pyenv/versions/{OTHER}*/bin/python"))


def runs(program):
    return shutil.which(program) is not None and subprocess.run([program, "-c", ""]).returncode == 0


def errors(text):
    return [line for line in text.splitlines() if line.lower().startswith(("error", "traceback"))]


def test_a_cluster_of_another_python_is_refused(project, another_python, tmp_path):
    project.write("python", trainers=[1], cluster=CLUSTER.format(inference=[0]))
    with some_hosts() as hosts, ray_cluster(tmp_path / "ray", hosts, project.env) as cluster:
        typed = (another_python / "bin" / "python", "-c", LEAD, cluster.address)
        log = project.folder / "python.log"
        running = hosts[0].start(*typed, out=log, env=cluster.variables, cwd=project.folder)
        assert running.wait(SECONDS) == 2, log.read_text()
        (line,) = errors(log.read_text())
        assert "This host and the Ray cluster at" in line
        assert "Install the same Python, Ray and Buckeye on all nodes" in line
        assert OTHER in line
        assert not left(cluster)


def test_who_has_what_is_said_where_nodes_have_too_little(project, tmp_path):
    project.write("little", trainers=[1], cluster=CLUSTER.format(inference=[0]))
    with some_hosts(3) as hosts, ray_cluster(tmp_path / "ray", hosts[:2], project.env) as cluster:
        third = hosts[2]
        cluster.start_node(third, cpus=0)
        wait_until(lambda: cluster.runs(third), 300, "Ray runs on the third")
        words = ("--cluster.nodes", "4", "--cluster.inference-nodes", "0", "--cluster.join-timeout", "5")
        running, log = start(project, cluster, "little", *words)
        assert running.wait(SECONDS) == 1, log.read_text()
        (_, _, said) = log.read_text().partition("cluster.nodes = 4 needs 3 Ray nodes beside this one")
        assert "there were 1 within 5 s (cluster.join_timeout)" in said
        assert f"  {hosts[1].address}: has enough" in said
        assert f"  {third.address}: free are CPU 0 of 1 needed" in said
        assert len(errors(log.read_text())) == 1
        assert not left(cluster)


def test_nodes_without_a_shared_output_folder_are_refused(project, tmp_path):
    (project.folder / "outputs").mkdir(exist_ok=True)
    project.write("own_disk", trainers=[1], cluster=CLUSTER.format(inference=[0]))
    own = project.folder / "outputs"
    with some_hosts(own=own) as hosts, ray_cluster(tmp_path / "ray", hosts, project.env) as cluster:
        running, log = start(project, cluster, "own_disk")
        assert running.wait(SECONDS) == 2, log.read_text()
        (line,) = errors(log.read_text())
        assert f"node 1 ({hosts[1].name}) does not see {own / 'own_disk'} of this host" in line
        assert not left(cluster)


def test_a_port_that_is_closed_between_nodes_is_named(project, tmp_path):
    port = 8123
    nodes = "[cluster]\nnodes = 2\ninference_nodes = [1]\ntrainer_nodes = [0]\n"
    output = project.write("closed", trainers=[1], cluster=nodes)
    with some_hosts() as hosts, ray_cluster(tmp_path / "ray", hosts, project.env) as cluster:
        first, second = hosts
        rule = ("rule", "add", "to", second.address, "ipproto", "tcp", "dport", str(port), "prohibit")
        subprocess.run(["ip", "-n", first.space, *rule], check=True)
        running, log = start(project, cluster, "closed", "--inference.server.port", str(port))
        said = f"http://{second.address}:{port} does not answer yet"
        wait_until(lambda: said in log.read_text(), 300, "it is said who does not answer")
        stopped = project.run("rl", "stop", "outputs/closed", core=first.core)
        assert stopped.returncode == 0, stopped.stdout + stopped.stderr
        assert running.wait(SECONDS) == 130, log.read_text()
        wait_until(lambda: not left(cluster), 60, "nothing of the run is left")
    assert not (output / "weights" / "step_1").exists()


@needs_slurm
def test_a_node_of_a_job_with_another_python_is_refused(project, another_python, tmp_path):
    project.write("other", trainers=[1], cluster=CLUSTER.format(inference=[0]))
    with some_hosts() as (first, plain):
        second = replace(plain, python=another_python)
        with slurm(tmp_path / "slurm", first, second) as running:
            job = submit(project, running, "other")
            wait_until(lambda: ended(running, job), SECONDS, "the job ends")
            log = (project.folder / f"buckeye-{job}.log").read_text()
            assert running.state(job) == "FAILED", log
            (line,) = errors(log)
            assert f"node 1 ({second.name}) has version" in line
            assert f"and {OTHER}." in line
            assert not [pid for host in (first, second) for pid in host.processes() if buckeye(pid)]


def buckeye(pid):
    from tests.cluster.hosts import words_of

    return "-m buckeye" in words_of(pid)
