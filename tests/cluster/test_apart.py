"""Runs on nodes that share nothing but the directory of the checkpoints: real Ray, real Slurm."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
from packages.machines.tests.test_s3 import moto

from buckeye.base.faults import DONE, FAULTS
from buckeye.transport.weights import read_weights_manifest, verify_weights
from tests.cluster.conftest import STEPS
from tests.cluster.hosts import needs_hosts, some_hosts, wait_until, words_of
from tests.cluster.project import attempts, records, result
from tests.cluster.ray import ray_cluster
from tests.cluster.slurm import needs_slurm, slurm
from tests.cluster.test_ray_run import start
from tests.cluster.test_slurm_run import ended, submit

pytestmark = [needs_hosts, pytest.mark.slow, pytest.mark.timeout(3600)]

SECONDS = 1500
OVER_THE_NETWORK = "batches and weights go over the network"


@pytest.fixture
def outputs(project):
    """What every host has for itself."""
    folder = project.folder / "outputs"
    folder.mkdir(exist_ok=True)
    return folder


def write(project, name, *, trainers, cluster):
    place = f'checkpoint_dir = "{project.folder}/shared/{name}"\n'
    return project.write(name, trainers=trainers, cluster=f"[cluster]\n{place}{cluster}")


def trained_once(output):
    """No attempt has trained a step twice, and none a step that the one before had committed."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    done = [(line["attempt"], line["step"]) for line in lines if line["process"] == "trainer"]
    assert len(set(done)) == len(done)
    for attempt in attempts(output):
        steps = [step for number, step in done if number == attempt["attempt"]]
        assert steps == sorted(steps)
        assert not steps or steps[0] == (attempt["resumed_step"] or 0)


def test_trainers_and_engines_on_nodes_without_a_shared_disk_give_the_result_of_one_host(
    project, single_host, outputs, tmp_path
):
    """The orchestrator is on the first host, the first rank and a batch's way on the second, the other rank
    and the engine on the third. Neither of these has the model."""
    shutil.copytree(project.folder / "tiny", outputs / "models" / "tiny", dirs_exist_ok=True)
    nodes = "nodes = 3\ntrainer_nodes = [1, 2]\ninference_nodes = [2]\n"
    output = write(project, "apart", trainers=[1], cluster=nodes)
    with some_hosts(3, own=outputs) as hosts, ray_cluster(tmp_path / "ray", hosts, project.env) as cluster:
        running, log = start(project, cluster, "apart", "--model.name", outputs / "models" / "tiny")
        assert running.wait(SECONDS) == 0, log.read_text()
    assert OVER_THE_NETWORK in log.read_text()
    assert result(output, STEPS) == single_host
    verify_weights(output / "weights" / f"step_{STEPS}")
    trained_once(output)
    assert not list((output / "batches").glob("step_*"))
    assert not list(output.rglob(".incoming-*"))
    assert "trainer" in (output / "logs" / "run.log").read_text()
    assert "is not on this node" in (output / "logs" / "trainer.stdout").read_text()


def test_a_lost_node_and_its_disk_cost_no_result(project, single_host, outputs, tmp_path):
    """A spare node stands in for that of the trainer; nothing of the run is on it."""
    nodes = "nodes = 2\ntrainer_nodes = [1]\ninference_nodes = [0]\n"
    output = write(project, "apart_lost", trainers=[1, 2], cluster=nodes)
    with some_hosts(3, own=outputs) as hosts, ray_cluster(tmp_path / "ray", hosts, project.env) as cluster:
        running, log = start(project, cluster, "apart_lost")
        wait_until(lambda: 1 in records(output, "trainer"), SECONDS, "two steps")
        hosts[1].kill()
        assert running.wait(SECONDS) == 0, log.read_text()
        assert f"{hosts[2].address} stands in for node 1" in log.read_text()
    assert attempts(output)[-1]["resumed_step"] is not None
    assert result(output, STEPS) == single_host
    trained_once(output)


def test_an_engine_whose_node_was_lost_is_brought_the_newest_weights(project, outputs, tmp_path):
    nodes = "nodes = 2\ntrainer_nodes = [0]\ninference_nodes = [0, 1]\n"
    output = write(project, "apart_engine", trainers=[1], cluster=nodes)
    with some_hosts(2, own=outputs) as hosts, ray_cluster(tmp_path / "ray", hosts, project.env) as cluster:
        running, log = start(project, cluster, "apart_engine", "--max-steps", "1000")
        wait_until(lambda: 1 in records(output, "trainer"), SECONDS, "two steps")
        hosts[1].kill()
        wait_until(lambda: "Node 1 (" in log.read_text(), SECONDS, "the node is missed")
        cluster.start_node(hosts[1])
        back = (output / "logs" / "orchestrator.stdout").read_text
        wait_until(
            lambda: f"http://{hosts[1].address}" in back() and "is back" in back(), SECONDS, "it is back"
        )
        said = project.run("rl", "stop", "outputs/apart_engine", core=hosts[0].core)
        assert said.returncode == 0, said.stdout + said.stderr
        assert running.wait(SECONDS) == 130, log.read_text()
    assert len(attempts(output)) == 1
    trained_once(output)


def test_checkpoints_without_a_place_that_survives_are_refused(project, outputs, tmp_path):
    project.write("homeless", trainers=[1], cluster="[cluster]\nnodes = 2\ninference_nodes = [0]\n")
    with some_hosts(2, own=outputs) as hosts, ray_cluster(tmp_path / "ray", hosts, project.env) as cluster:
        running, log = start(project, cluster, "homeless")
        assert running.wait(SECONDS) == 2, log.read_text()
        assert "set cluster.checkpoint_dir to a directory that all nodes share" in log.read_text()
        left = [pid for host in hosts for pid in host.processes() if "-m buckeye" in words_of(pid)]
        assert not left


@needs_slurm
def test_a_job_whose_nodes_share_no_disk_gives_the_result_of_one_host(
    project, single_host, outputs, tmp_path
):
    nodes = "nodes = 2\ntrainer_nodes = [1]\ninference_nodes = [0]\n"
    output = write(project, "apart_job", trainers=[1, 2], cluster=nodes)
    with some_hosts(2, own=outputs) as hosts, slurm(tmp_path / "slurm", *hosts) as running:
        job = submit(project, running, "apart_job")
        wait_until(lambda: 1 in records(output, "trainer"), SECONDS, "two steps")
        found = [pid for pid in hosts[1].processes() if "engines.apart trainer" in words_of(pid)]
        assert len(found) == 2
        wait_until(lambda: ended(running, job), SECONDS, "the job ends")
        log = (output / "slurm" / "job.log").read_text()
        assert running.state(job) == "COMPLETED", log
    assert OVER_THE_NETWORK in log
    assert result(output, STEPS) == single_host
    trained_once(output)


@needs_slurm
def test_a_job_that_loses_a_node_with_its_disk_goes_on_from_the_checkpoint(
    project, single_host, outputs, tmp_path
):
    nodes = "nodes = 2\ntrainer_nodes = [1]\ninference_nodes = [0]\n"
    output = write(project, "apart_requeued", trainers=[1, 2], cluster=nodes)
    with some_hosts(2, own=outputs) as hosts, slurm(tmp_path / "slurm", *hosts) as running:
        job = submit(project, running, "apart_requeued")
        wait_until(lambda: 1 in records(output, "trainer"), SECONDS, "two steps")
        hosts[1].kill()
        wait_until(lambda: running.state(job) in ("PENDING", "REQUEUED"), 900, "the job waits again")
        running.start_node(hosts[1])
        wait_until(lambda: ended(running, job), SECONDS, "the job ends")
        log = (output / "slurm" / "job.log").read_text()
        assert running.state(job) == "COMPLETED", log
    assert attempts(output)[-1]["resumed_step"] is not None
    assert result(output, STEPS) == single_host
    trained_once(output)


def test_a_store_is_all_that_outlives_a_run_which_is_killed_in_an_upload(
    project, single_host, outputs, tmp_path
):
    """Node 0 loses its directory with it. The store's server is on node 0, which goes on."""
    output = project.write(
        "apart_store",
        trainers=[1, 2],
        cluster="[cluster]\nnodes = 2\ntrainer_nodes = [1]\ninference_nodes = [0]\n",
    )
    marks = tmp_path / "marks"
    marks.mkdir()
    with some_hosts(2, own=outputs) as hosts:
        url = f"http://{hosts[0].address}:5000"
        env = {**project.env, "AWS_ENDPOINT_URL": url, "AWS_DEFAULT_REGION": "us-east-1"}
        env |= {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "a-secret-of-the-tests"}
        words = (moto(), "-H", hosts[0].address, "-p", 5000)
        hosts[0].start(*words, out=tmp_path / "moto.log", env=env, cwd=tmp_path)
        make = f"import httpx; httpx.put('{url}/bucket').raise_for_status()"
        put = hosts[0].argv(sys.executable, "-c", make)
        wait_until(lambda: subprocess.run(put, capture_output=True).returncode == 0, 120, "a bucket")
        with ray_cluster(tmp_path / "ray", hosts, env) as cluster:
            store = ("--ckpt.store", "s3://bucket/x")
            faulty = replace(cluster, env={**env, FAULTS: "store.upload=kill@15", DONE: str(marks)})
            running, log = start(project, faulty, "apart_store", *store)
            assert running.wait(SECONDS) == -9, log.read_text()
            assert "checkpoints to this node, and to the store" in log.read_text()
            shutil.rmtree(output)
            running, log = start(project, cluster, "apart_store", *store, "--resume")
            assert running.wait(SECONDS) == 0, log.read_text()
    assert "Going on from the checkpoint of step" in log.read_text()
    assert attempts(output)[-1]["resumed_step"]
    assert "a-secret-of-the-tests" not in log.read_text()
    assert STEPS - 1 in records(output, "trainer")  # those of before come back from the other node's disk
    last = read_weights_manifest(output / "weights" / f"step_{STEPS}")
    assert last.checksum == single_host.checksum
