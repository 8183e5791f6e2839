"""A run that is a job of Ray, and one whose host is no part of the cluster."""

import sysconfig
from importlib.metadata import version

import pytest

from tests.cluster.conftest import STEPS
from tests.cluster.hosts import needs_hosts, some_hosts, wait_until
from tests.cluster.project import result
from tests.cluster.ray import ray_cluster
from tests.cluster.test_ray_run import CLUSTER, SECONDS, left
from tests.remote.venvs import venv_with

pytestmark = [needs_hosts, pytest.mark.slow, pytest.mark.timeout(3600)]

JOBS, CLIENTS = 8265, 10001


@pytest.fixture(scope="module")
def python():
    """An interpreter with all of ours, and with what Ray needs for jobs and for clients."""
    folder = venv_with("ray-jobs", f"ray[default,client]=={version('ray')}")
    (site,) = folder.parent.glob("lib/python*/site-packages")
    (site / "ours.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    return folder / "python"


@pytest.fixture(scope="module")
def cluster(project, tmp_path_factory, python):
    with some_hosts(3) as hosts:
        dashboard = ("--dashboard-host", hosts[0].address, "--dashboard-port", str(JOBS))
        more = {"python": python, "dashboard": dashboard}
        with ray_cluster(
            tmp_path_factory.mktemp("ray") / "cluster", hosts[:2], project.env, **more
        ) as running:
            yield running, hosts[2]


def wait_for(process, log):
    assert process.wait(SECONDS) == 0, log.read_text()


def test_a_job_of_ray_finds_its_cluster(project, single_host, cluster, python):
    running, _ = cluster
    output = project.write("job", trainers=[1], cluster=CLUSTER.format(inference=[0]))
    head, log = running.hosts[0], project.folder / "job.log"
    typed = f"cd {project.folder} && exec {python} -m buckeye rl @ job.toml --cluster.engine ray"
    submit = ("-m", "ray.scripts.scripts", "job", "submit", "--address", f"http://{head.address}:{JOBS}")
    env = running.variables
    job = head.start(python, *submit, "--", "bash", "-c", typed, out=log, env=env, cwd=project.folder)
    wait_for(job, log)
    assert result(output, STEPS) == single_host
    wait_until(lambda: not left(running), 60, "nothing of the run is left")


def test_a_host_that_is_no_part_of_the_cluster_leads_a_run(project, single_host, cluster, python):
    running, host = cluster
    output = project.write("client", trainers=[1], cluster=CLUSTER.format(inference=[0]))
    log, address = project.folder / "client.log", f"ray://{running.hosts[0].address}:{CLIENTS}"
    words = (
        "-m",
        "buckeye",
        "rl",
        "@",
        "client.toml",
        "--cluster.engine",
        "ray",
        "--cluster.ray-address",
        address,
    )
    wait_for(host.start(python, *words, out=log, env=running.variables, cwd=project.folder), log)
    assert result(output, STEPS) == single_host
    wait_until(lambda: not left(running), 60, "nothing of the run is left")
