"""A run on a real Ray cluster of two nodes."""

import pytest

from tests.cluster.conftest import STEPS
from tests.cluster.hosts import needs_hosts, some_hosts, wait_until, words_of
from tests.cluster.project import attempts, records, result
from tests.cluster.ray import ray_cluster

pytestmark = [needs_hosts, pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(3600)]

SECONDS = 1500
CLUSTER = "[cluster]\nnodes = 2\ninference_nodes = {inference}\n"


@pytest.fixture
def hosts():
    with some_hosts() as pair:
        yield pair


@pytest.fixture
def cluster(hosts, project, tmp_path):
    with ray_cluster(tmp_path / "ray", hosts, project.env) as running:
        yield running


def start(project, cluster, name, *words):
    words = (
        "rl",
        "@",
        f"{name}.toml",
        "--cluster.engine",
        "ray",
        "--cluster.ray-address",
        cluster.address,
        *words,
    )
    out, env = project.folder / f"{name}.log", cluster.variables
    return cluster.hosts[0].start(*project.argv(*words), out=out, env=env, cwd=project.folder), out


def test_run_survives_loss_of_a_node(project, single_host, cluster):
    second = cluster.hosts[1]
    output = project.write("lost", trainers=[1], cluster=CLUSTER.format(inference=[0]))
    running, log = start(project, cluster, "lost")
    wait_until(lambda: 1 in records(output, "trainer"), SECONDS, "two steps")
    second.kill()
    wait_until(lambda: "Waiting at most" in log.read_text(), SECONDS, "the node is missed")
    cluster.start_node(second)
    assert running.wait(SECONDS) == 0, log.read_text()
    assert f"Node 1 ({second.address}) is lost" in log.read_text()
    assert attempts(output)[-1]["resumed_step"] is not None
    assert result(output, STEPS) == single_host


def test_inference_on_lost_node_is_restarted_alone(project, cluster):
    first, second = cluster.hosts
    output = project.write("replica", trainers=[1], cluster=CLUSTER.format(inference=[0, 1]))
    running, log = start(project, cluster, "replica", "--cluster.trainer-nodes", "0", "--max-steps", "1000")
    wait_until(lambda: 1 in records(output, "trainer"), SECONDS, "two steps")
    second.kill()
    wait_until(lambda: "Node 1 (" in log.read_text(), SECONDS, "the node is missed")
    step = max(records(output, "trainer"))
    wait_until(
        lambda: max(records(output, "trainer")) > step + 2, SECONDS, "the run continues without the node"
    )
    cluster.start_node(second)
    back = (output / "logs" / "orchestrator.stdout").read_text
    used = f"http://{second.address}:"
    wait_until(lambda: used in back() and "is used again" in back(), SECONDS, "its server is used again")
    said = project.run("rl", "stop", "outputs/replica", core=first.core)
    assert said.returncode == 0, said.stdout + said.stderr
    assert running.wait(SECONDS) == 130, log.read_text()
    assert len(attempts(output)) == 1


def test_killed_launcher_leaves_no_processes_on_nodes(project, cluster):
    output = project.write("killed", trainers=[1], cluster=CLUSTER.format(inference=[0]))
    running, log = start(project, cluster, "killed", "--max-steps", "1000")
    wait_until(lambda: 1 in records(output, "trainer"), SECONDS, "two steps")
    running.kill()
    running.wait(SECONDS)
    wait_until(lambda: not left(cluster), 120, f"nothing of the run is left: {log.read_text()}")


def left(cluster):
    return [pid for host in cluster.hosts for pid in host.processes() if "-m buckeye" in words_of(pid)]
