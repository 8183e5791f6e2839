"""Environments in workers on other nodes of a real Ray cluster."""

import pytest

from tests.cluster.conftest import STEPS
from tests.cluster.hosts import needs_hosts, some_hosts, wait_until, words_of
from tests.cluster.project import attempts, records, result
from tests.cluster.ray import ray_cluster
from tests.cluster.test_ray_run import SECONDS, left, start

pytestmark = [needs_hosts, pytest.mark.slow, pytest.mark.timeout(3600)]

NODES = "[cluster]\nnodes = 3\ninference_nodes = [0]\ntrainer_nodes = [0]\n"
LONG = ("--max-steps", "100000", "--max-async-level", "1", "--orchestrator.zero-spread", "keep")


def write(project, name, env):
    """A run of three nodes whose environment has these settings, too."""
    output = project.write(name, trainers=[1, 2], cluster=NODES)
    path = project.folder / f"{name}.toml"
    path.write_text(path.read_text().replace('id = "letters.py"', env))
    return output


def steps(output):
    return sorted(records(output, "orchestrator"))


def with_words(host, words):
    return [pid for pid in host.processes() if words in words_of(pid)]


def _ends_well(project, cluster, running, log, output):
    name = output.name
    said = project.run("rl", "stop", f"outputs/{name}", core=cluster.hosts[0].core)
    assert said.returncode == 0, said.stdout + said.stderr
    assert running.wait(SECONDS) == 130, log.read_text()
    wait_until(lambda: not left(cluster), 60, "nothing of the run is left")
    assert all(step["rollouts/unaccounted"] == 0 for step in records(output, "orchestrator").values())
    assert len(attempts(output)) == 1
    for step in records(output, "orchestrator").values():  # what was lost was played again
        assert (step["rollouts/errored"], step["rollouts/failed"]) == (0, step["rollouts/retried"])


def begin(project, cluster, name, *words):
    """A run, its log, and what waits until something is true of it; not for a run that has ended."""
    running, log = start(project, cluster, name, *words)

    def until(true, what):
        wait_until(lambda: true() or _ended(running, log), SECONDS, what)

    return running, log, until


def _ended(running, log):
    assert running.poll() is None, log.read_text()
    return False


def goes_on(output, until, more=3):
    newest = steps(output)[-1]
    until(lambda: steps(output)[-1] > newest + more, "it goes on")


def test_workers_on_other_nodes_give_the_result_of_one_host(project, single_host, tmp_path):
    output = write(project, "workers", 'id = "letters.py"\nplacement = [1, 2]')
    with some_hosts(3) as hosts, ray_cluster(tmp_path / "ray", hosts, project.env) as cluster:
        running, log, until = begin(project, cluster, "workers")
        until(lambda: 1 in records(output, "trainer"), "two steps")
        for host in hosts[1:]:
            assert len(with_words(host, "worker_side/main.py")) == 1
        assert running.wait(SECONDS) == 0, log.read_text()
        wait_until(lambda: not left(cluster), 60, "nothing of the run is left")
    assert result(output, STEPS) == single_host


def test_what_workers_of_a_lost_node_played_is_played_by_others(project, tmp_path):
    output = write(project, "workers_lost", 'id = "letters.py"\nplacement = [1, 2]')
    with some_hosts(3) as hosts, ray_cluster(tmp_path / "ray", hosts, project.env) as cluster:
        running, log, until = begin(project, cluster, "workers_lost", *LONG)
        until(lambda: len(steps(output)) > 1, "two steps")
        hosts[2].kill()
        until(lambda: "is lost" in log.read_text(), "the node is missed")
        until(lambda: len(with_words(hosts[1], "worker_side/main.py")) == 2, "one stands in")
        goes_on(output, until)
        cluster.start_node(hosts[2])
        until(lambda: with_words(hosts[2], "buckeye.cli.worker_host"), "it is there again")
        _ends_well(project, cluster, running, log, output)
