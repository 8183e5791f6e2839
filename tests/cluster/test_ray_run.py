"""A run on a real Ray cluster of two nodes, and on hosts that were named to ssh."""

import asyncio
import json
import subprocess

import pytest
from packages.machines.tests.sshd import make_key, needs_sshd, sshd

from buckeye_machines.bootstrap import EXTRAS, bootstrap
from buckeye_machines.connection import Link
from tests.cluster.conftest import STEPS
from tests.cluster.hosts import needs_hosts, some_hosts, wait_until, words_of
from tests.cluster.project import attempts, records, result
from tests.cluster.ray import ray_cluster

pytestmark = [needs_hosts, pytest.mark.slow, pytest.mark.timeout(3600)]

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
    words = ("rl", "@", f"{name}.toml", "--launcher", "ray", "--address", cluster.address, *words)
    out, env = project.folder / f"{name}.log", cluster.variables
    return cluster.hosts[0].start(*project.argv(*words), out=out, env=env, cwd=project.folder), out


def test_two_nodes_of_ray_give_the_result_of_one_host(project, single_host, cluster):
    output = project.write("ray", trainers=[1], cluster=CLUSTER.format(inference=[0]))
    running, log = start(project, cluster, "ray")
    wait_until(lambda: 1 in records(output, "trainer"), SECONDS, "two steps")
    assert len([pid for pid in cluster.hosts[1].processes() if "trainer" in words_of(pid)]) == 1
    assert running.wait(SECONDS) == 0, log.read_text()
    assert result(output, STEPS) == single_host
    assert cluster.token not in log.read_text()
    wait_until(lambda: not left(cluster), 60, "nothing of the run is left")


def test_a_node_that_is_switched_off_costs_no_result(project, single_host, cluster):
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


def test_inference_of_a_lost_node_comes_back_alone(project, cluster):
    first, second = cluster.hosts
    output = project.write("replica", trainers=[1], cluster=CLUSTER.format(inference=[0, 1]))
    running, log = start(project, cluster, "replica", "--cluster.trainer-nodes", "0", "--max-steps", "1000")
    wait_until(lambda: 1 in records(output, "trainer"), SECONDS, "two steps")
    second.kill()
    wait_until(lambda: "Node 1 (" in log.read_text(), SECONDS, "the node is missed")
    step = max(records(output, "trainer"))
    wait_until(lambda: max(records(output, "trainer")) > step + 2, SECONDS, "it goes on without the node")
    cluster.start_node(second)
    back = (output / "logs" / "orchestrator.stdout").read_text
    wait_until(lambda: f"http://{second.address}" in back() and "is back" in back(), SECONDS, "it is back")
    said = project.run("rl", "stop", "outputs/replica", core=first.core)
    assert said.returncode == 0, said.stdout + said.stderr
    assert running.wait(SECONDS) == 130, log.read_text()
    assert len(attempts(output)) == 1


def test_a_launcher_that_is_killed_leaves_nothing_on_the_nodes(project, cluster):
    output = project.write("killed", trainers=[1], cluster=CLUSTER.format(inference=[0]))
    running, log = start(project, cluster, "killed", "--max-steps", "1000")
    wait_until(lambda: 1 in records(output, "trainer"), SECONDS, "two steps")
    running.kill()
    running.wait(SECONDS)
    wait_until(lambda: not left(cluster), 120, f"nothing of the run is left: {log.read_text()}")


def test_a_spare_node_stands_in_for_one_that_is_lost(project, single_host, tmp_path):
    output = project.write("spare", trainers=[1], cluster=CLUSTER.format(inference=[0]))
    with some_hosts(3) as hosts, ray_cluster(tmp_path / "ray", hosts, project.env) as cluster:
        running, log = start(project, cluster, "spare")
        wait_until(lambda: 1 in records(output, "trainer"), SECONDS, "two steps")
        hosts[1].kill()
        assert running.wait(SECONDS) == 0, log.read_text()
        assert f"{hosts[2].address} stands in for node 1" in log.read_text()
    assert attempts(output)[-1]["resumed_step"] is not None
    assert result(output, STEPS) == single_host


def test_the_trainer_goes_on_with_fewer_ranks_and_has_them_again(project, cluster):
    first, second = cluster.hosts
    shrinks = CLUSTER.format(inference=[0]) + 'on_lost_node = "shrink"\n'
    output = project.write("fewer", trainers=[1], cluster=shrinks)
    running, log = start(project, cluster, "fewer", "--max-steps", "5000")
    wait_until(lambda: 1 in records(output, "trainer"), SECONDS, "two steps")
    second.kill()
    wait_until(lambda: "goes on with 1 of its 2 ranks" in log.read_text(), SECONDS, "it does without")
    lost = max(records(output, "trainer"))
    wait_until(lambda: max(records(output, "trainer")) > lost + 2, SECONDS, "it goes on alone")
    cluster.start_node(second)
    wait_until(lambda: "goes on with 2 of its 2 ranks" in log.read_text(), SECONDS, "the node is back")
    back = max(records(output, "trainer"))
    wait_until(lambda: max(records(output, "trainer")) > back + 2, SECONDS, "both train")
    assert len([pid for pid in second.processes() if "buckeye trainer" in words_of(pid)]) == 1
    said = project.run("rl", "stop", "outputs/fewer", core=first.core)
    assert said.returncode == 0, said.stdout + said.stderr
    assert running.wait(SECONDS) == 130, log.read_text()
    steps = records(output, "trainer")
    assert sorted(steps) == list(range(len(steps)))  # each is trained, and counted once
    assert {step["samples"] for step in steps.values()} == {16}
    events = [json.loads(line) for line in (output / "events.jsonl").read_text().splitlines()]
    assert [event["ranks"] for event in events if event["event"] == "ranks"] == [1, 2]


def test_engines_are_added_on_other_nodes(project, tmp_path):
    output = project.write("engines", trainers=[1], cluster=CLUSTER.format(inference=[0]))
    words = ("--max-steps", "100000", "--max-async-level", "1", "--cluster.trainer-nodes", "1")

    def scale(first, *words):
        typed = first.argv(*project.argv("rl", "scale", "outputs/engines", "--inference", *words))
        done = subprocess.run(
            typed,
            cwd=project.folder,
            env=project.env,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def up():
        steps = records(output, "orchestrator")
        return steps[max(steps)].get("inference/up") if steps else None

    with some_hosts(3) as hosts, ray_cluster(tmp_path / "ray", hosts, project.env) as cluster:
        running, log = start(project, cluster, "engines", *words)
        wait_until(lambda: up() == 1, SECONDS, "the first steps")
        scale(hosts[0], 3, "--nodes", 3)
        wait_until(lambda: up() == 3, SECONDS, "three engines play")
        for host in hosts[1:]:
            assert len([pid for pid in host.processes() if "buckeye inference" in words_of(pid)]) == 1
        scale(hosts[0], 2)
        wait_until(lambda: up() == 2, SECONDS, "two engines play")
        assert "Node 2 of the run is at" in log.read_text()
        said = project.run("rl", "stop", "outputs/engines", core=hosts[0].core)
        assert said.returncode == 0, said.stdout + said.stderr
        assert running.wait(SECONDS) == 130, log.read_text()
        wait_until(lambda: not left(cluster), 60, "nothing of the run is left")
    assert all(step["rollouts/unaccounted"] == 0 for step in records(output, "orchestrator").values())
    assert len(attempts(output)) == 1


@pytest.fixture(scope="session")
def software(tmp_path_factory):
    """What the hosts install is there: they reach no index of packages, and we do."""

    async def install(host):
        link = Link(
            host.target,
            known_hosts=host.folder / "known_hosts",
            identity_file=host.key,
            own_settings=False,
            tell=print,
        )
        await link.connect(patience=60)
        await bootstrap(link, tell=print, extras=(*EXTRAS, "ray"))
        await link.close()

    with sshd(tmp_path_factory.mktemp("software")) as host:
        asyncio.run(install(host))


@needs_sshd
@pytest.mark.usefixtures("software")
def test_several_hosts_for_ssh_give_the_result_of_one(project, single_host, hosts, tmp_path):
    from tests.cluster.ssh import PORT, serve

    first, second = hosts
    output = project.write("ssh", trainers=[1], cluster=CLUSTER.format(inference=[0]))
    key, home = make_key(tmp_path / "key"), tmp_path / "home"
    for host in hosts:
        serve(host, tmp_path / host.name, home=home, key=key)
    words = ("rl", "@", "ssh.toml", "--provider", "ssh", "--yes", "--identity-file", key)
    named = [word for host in hosts for word in ("--host", f"root@{host.address}:{PORT}")]
    out = project.folder / "ssh.log"
    running = first.start(*project.argv(*words, *named), out=out, env=project.env, cwd=project.folder)
    assert running.wait(SECONDS) == 0, out.read_text()
    assert result(output, STEPS) == single_host
    assert not list(home.rglob("env"))
    wait_until(
        lambda: not [pid for pid in second.processes() if "ray" in words_of(pid)], 120, "Ray has ended"
    )


def left(cluster):
    return [pid for host in cluster.hosts for pid in host.processes() if "-m buckeye" in words_of(pid)]
