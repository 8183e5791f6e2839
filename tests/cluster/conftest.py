"""Reference result of a run on a single host."""

import os

import pytest

from tests.cluster.project import make_project, result

STEPS = 5


@pytest.fixture(scope="session")
def project(tmp_path_factory):
    return make_project(tmp_path_factory.mktemp("cluster"), steps=STEPS)


@pytest.fixture(scope="session")
def single_host(project):
    """The cluster's run with two trainer ranks on one host, on one core like each of the two hosts."""
    output = project.write("single", trainers=[1, 2])
    done = project.run("rl", "@", "single.toml", core=min(os.sched_getaffinity(0)))
    assert done.returncode == 0, done.stdout + done.stderr
    found = result(output, STEPS)
    assert any(found.losses)
    assert any(found.rewards)
    return found
