"""Environments in workers on other nodes of a real Ray cluster."""

import pytest

from tests.cluster.conftest import STEPS
from tests.cluster.hosts import needs_hosts, some_hosts, wait_until, words_of
from tests.cluster.project import records, result
from tests.cluster.ray import ray_cluster
from tests.cluster.test_ray_run import SECONDS, left, start

pytestmark = [needs_hosts, pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(3600)]

NODES = "[cluster]\nnodes = 3\ninference_nodes = [0]\ntrainer_nodes = [0]\n"


def test_run_with_workers_on_other_nodes_equals_run_on_one_host(project, single_host, tmp_path):
    output = project.write("workers", trainers=[1, 2], cluster=NODES)
    path = project.folder / "workers.toml"
    path.write_text(path.read_text().replace('id = "letters.py"', 'id = "letters.py"\nplacement = [1, 2]'))
    with some_hosts(3) as hosts, ray_cluster(tmp_path / "ray", hosts, project.env) as cluster:
        running, log = start(project, cluster, "workers")
        wait_until(lambda: 1 in records(output, "trainer"), SECONDS, "two steps")
        for host in hosts[1:]:
            assert sum("worker_side/main.py" in words_of(pid) for pid in host.processes()) == 1
        assert running.wait(SECONDS) == 0, log.read_text()
        wait_until(lambda: not left(cluster), 60, "nothing of the run is left")
    assert result(output, STEPS) == single_host
