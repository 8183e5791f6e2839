"""A run on two hosts: with nodes that were joined by hand, and with hosts that were named to ssh."""

import pytest
from packages.machines.tests.sshd import make_key, needs_sshd

from tests.cluster.conftest import STEPS
from tests.cluster.hosts import needs_hosts, two_hosts, wait_until
from tests.cluster.project import attempts, records, result

pytestmark = [needs_hosts, pytest.mark.slow, pytest.mark.timeout(3600)]

SECONDS = 1500
CLUSTER = "[cluster]\nnodes = 2\ninference_nodes = {inference}\nport = 29417\n"


@pytest.fixture
def hosts():
    with two_hosts() as pair:
        yield pair


def join(project, head, host, output):
    words = ("node", "--head", f"{head.address}:29417", "--key-file", output / "cluster.key")
    return host.start(
        *project.argv(*words, "--name", host.name),
        out=project.folder / f"{output.name}-{host.name}.log",
        env=project.env,
        cwd=project.folder,
    )


def start(project, host, name, *words):
    words = ("rl", "@", f"{name}.toml", "--cluster.address", host.address, *words)
    out = project.folder / f"{name}.log"
    return host.start(*project.argv(*words), out=out, env=project.env, cwd=project.folder), out


def test_a_host_that_is_switched_off_costs_no_result(project, single_host, hosts):
    first, second = hosts
    output = project.write("lost", trainers=[1], cluster=CLUSTER.format(inference=[0]))
    running, log = start(project, first, "lost")
    join(project, first, second, output)
    wait_until(lambda: 1 in records(output, "trainer"), SECONDS, "two steps")
    second.kill()
    wait_until(lambda: "Waiting at most" in log.read_text(), SECONDS, "the node is missed")
    joined = join(project, first, second, output)
    assert running.wait(SECONDS) == 0, log.read_text()
    assert joined.wait(60) == 0
    assert "lost its node n2" in log.read_text()
    assert attempts(output)[-1]["resumed_step"] is not None
    assert result(output, STEPS) == single_host


def test_inference_of_a_lost_host_comes_back_alone(project, hosts):
    first, second = hosts
    output = project.write("replica", trainers=[1], cluster=CLUSTER.format(inference=[0, 1]))
    running, log = start(project, first, "replica", "--cluster.trainer-nodes", "0", "--max-steps", "1000")
    join(project, first, second, output)
    wait_until(lambda: 1 in records(output, "trainer"), SECONDS, "two steps")
    second.kill()
    wait_until(lambda: "Node 1 (n2) is lost" in log.read_text(), SECONDS, "the node is missed")
    step = max(records(output, "trainer"))
    wait_until(lambda: max(records(output, "trainer")) > step + 2, SECONDS, "it goes on without the host")
    joined = join(project, first, second, output)
    back = (output / "logs" / "orchestrator.stdout").read_text
    wait_until(lambda: f"http://{second.address}" in back() and "is back" in back(), SECONDS, "it is back")
    said = project.run("rl", "stop", "outputs/replica", core=first.core)
    assert said.returncode == 0, said.stdout + said.stderr
    assert running.wait(SECONDS) == 130, log.read_text()
    assert joined.wait(60) == 0
    assert len(attempts(output)) == 1


@needs_sshd
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
    left = [path for path in home.rglob("*") if path.is_file() and path.name == "cluster.key"]
    assert left == []
    assert "2 hosts" not in out.read_text()
    assert second.processes() != []  # sshd is
