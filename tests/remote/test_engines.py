"""Processes on other nodes, started by a fake srun on this host; and settings that Ray refuses."""

import os
import signal
import socket
import sys

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buckeye.config.load import load_config
from buckeye.config.rl import RLConfig
from buckeye.errors import RunError, UsageError
from buckeye.launch import remote_process
from buckeye.launch.engines import other_nodes, select_engine, srun
from buckeye.launch.engines.node import frames, process_environment
from buckeye.launch.hosts import HostFacts
from buckeye.launch.plan import Role
from buckeye.version import __version__
from tests.waiting import wait_for

WORDS = ("--trainer", "--orchestrator.env.0.id", "x", "--inference", "{}")
SRUN = """#!/bin/sh
echo "$@" >> "$SRUN_WORDS"
while [ "${1#--}" != "$1" ]; do shift; done
exec "$@"
"""
SCONTROL = """#!/bin/sh
if [ "$2" = hostnames ]; then printf 'n1\\nn2\\n'; else echo "   NodeAddr=127.0.0.1 NodeHostName=n2"; fi
"""


def config(tmp_path, *words):
    given = [*WORDS, "--cluster.nodes", "2", "--output-dir", str(tmp_path / "out"), *words]
    return load_config(RLConfig, given)


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Slurm job with two nodes that are both this host."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    for name, value in {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SRUN_WORDS": str(tmp_path / "words"),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURMD_NODENAME": "n1",
        "SLURM_JOB_CPUS_PER_NODE": "3(x2)",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return tmp_path


@pytest.fixture
def node(job):
    with other_nodes(config(job)) as nodes:
        assert nodes.address == "127.0.0.1"
        yield nodes.hosts[1]


WAITS = (
    "import time; from buckeye.base.process import die_with_parent; die_with_parent(); "
    "print('here', flush=True); time.sleep(600)"
)


def start(node, folder, code, **env):
    role = Role(kind="trainer", index=1, argv=(sys.executable, "-c", code), node=1)
    return node.start(role, env, folder / "stdout")


@pytest.mark.e2e
def test_srun_host_returns_facts_and_ports(node, job):
    facts = node.facts()
    assert (facts.version, facts.address) == (__version__, "127.0.0.1")
    assert facts.cores >= 1
    assert len(set(node.choose_ports(3))) == 3
    words = (job / "words").read_text()
    assert "--overlap --nodes=1 --ntasks=1 --nodelist=n2 --mem=0 --gpu-bind=none" in words
    assert "--cpus-per-task=3" in words


@pytest.mark.e2e
def test_srun_process_reports_output_heartbeats_and_end(node, job):
    code = (
        "import os; os.write(int(os.environ['BUCKEYE_HEARTBEAT_FD']), b'{\"pulse\": 1e9}\\n'); "
        "print(os.environ['WORD']); raise SystemExit(3)"
    )
    process = start(node, job, code, WORD="secret")
    assert process.wait() == 3
    assert process.lost is None
    assert process.pid > 0
    assert (job / "stdout").read_text() == "secret\n"
    assert b'"pulse"' in os.read(process.heartbeats, 1000)
    assert "secret" not in (job / "words").read_text()


@pytest.mark.e2e
def test_a_signal_reaches_the_session(node, job):
    code = "import os, time; os.fork(); print('here', flush=True); time.sleep(600)"
    process = start(node, job, code)
    wait_for(lambda: (job / "stdout").read_text().count("here") == 2, "both print")
    process.signal(signal.SIGTERM, session=True)
    assert process.wait() == -signal.SIGTERM
    process.signal(signal.SIGTERM, session=True)  # no process is left to receive it


@pytest.mark.e2e
def test_lost_step_is_a_lost_process(node, job, wording):
    process = start(node, job, WAITS)
    wait_for(lambda: "here" in (job / "stdout").read_text(), "it prints")
    step = psutil.Process(process.pid).parent()
    assert step.cmdline()[-1] == "run"
    step.kill()
    assert process.wait() == -signal.SIGKILL
    assert process.lost == wording
    wait_for(lambda: not psutil.pid_exists(process.pid), "the process has ended")


@pytest.mark.e2e
def test_node_with_lost_step_is_absent_until_it_responds(node, job, monkeypatch):
    monkeypatch.setattr(srun, "_RETRY_SECONDS", 0.1)
    process = start(node, job, WAITS)
    wait_for(lambda: "here" in (job / "stdout").read_text(), "it prints")
    assert node.absent is None
    (job / "srun").rename(job / "away")
    psutil.Process(process.pid).parent().kill()
    wait_for(lambda: process.lost, "the step is lost")
    assert node.absent == "node n2"
    (job / "away").rename(job / "srun")
    wait_for(lambda: node.absent is None, "it answers")


@pytest.mark.e2e
def test_a_process_ends_with_the_launcher(node, job):
    process = start(node, job, WAITS)
    wait_for(lambda: "here" in (job / "stdout").read_text(), "it prints")
    command = psutil.Process(process.pid).parent()
    nothing = os.open(os.devnull, os.O_WRONLY)
    for descriptor in _pipes_to(command):
        os.dup2(nothing, descriptor)  # closes the pipe, as the kernel does when a launcher is killed
    os.close(nothing)
    assert process.wait() == -signal.SIGKILL
    wait_for(lambda: not psutil.pid_exists(process.pid), "the process has ended")


def _pipes_to(process):
    """Return our ends of the pipe that is the standard input of `process`."""
    theirs = os.readlink(f"/proc/{process.pid}/fd/0")
    ours = [int(name) for name in os.listdir("/proc/self/fd")]
    return [number for number in ours if _target(number) == theirs]


def _target(number):
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        return None


@pytest.mark.parametrize(("version", "python"), [("0.0.1", sys.version.split()[0]), (__version__, "3.10.2")])
def test_a_node_of_another_version_is_refused(job, monkeypatch, version, python):
    told = HostFacts(
        name="n2", version=version, python=python, cores=1, gpus=(), address="127.0.0.1", variables={}
    )
    monkeypatch.setattr(srun.SrunHost, "facts", lambda self: told)
    with pytest.raises(UsageError) as caught, other_nodes(config(job)):
        pass
    assert caught.value.code == "BK-PACKAGE-VERSION"
    assert f"node 1 (n2) has Buckeye {version} and Python {python}" in caught.value.message


def test_node_that_does_not_see_output_directory_is_refused(job, monkeypatch, refusal):
    monkeypatch.setattr(srun.SrunHost, "sees", lambda self, path, content: False)
    with refusal(UsageError), other_nodes(config(job)):
        pass
    assert list((job / "out").iterdir()) == []


def test_failed_srun_is_reported_with_its_output(job, refusal):
    (job / "srun").write_text("#!/bin/sh\necho 'srun: error: Node n2 is down' >&2\nexit 1\n")
    with refusal(RunError), other_nodes(config(job)):
        pass


def test_too_few_nodes_are_refused(job):
    with (
        pytest.raises(UsageError, match=r"cluster.nodes = 3, but Slurm job 7 has 2 nodes: n\[1-2\]"),
        other_nodes(config(job, "--cluster.nodes", "3", "--cluster.inference-nodes", "0,1,2")),
    ):
        pass


def test_nodes_of_a_heterogeneous_job_are_named_with_their_component(job, monkeypatch):
    (job / "scontrol").write_text(
        '#!/bin/sh\nif [ "$2" = hostnames ]; then echo "$3"; else echo "NodeAddr=127.0.0.1"; fi\n'
    )
    for name, value in {
        "SLURM_HET_SIZE": "2",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "n1",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "g1",
        "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_0": "2",
        "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_1": "5",
    }.items():
        monkeypatch.setenv(name, value)
    with other_nodes(config(job)):
        words = (job / "words").read_text()
    assert "--nodelist=g1" in words
    assert "--het-group=1 --cpus-per-task=5" in words


@pytest.mark.parametrize(
    ("variables", "engine"),
    [({}, "ray"), ({"SLURM_JOB_ID": "7"}, "srun"), ({"SLURM_JOB_ID": "7", "RAY_ADDRESS": "a:1"}, "ray")],
)
def test_select_engine_detects_slurm_and_ray(tmp_path, monkeypatch, variables, engine):
    for name in ("SLURM_JOB_ID", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert select_engine(config(tmp_path)) == engine


@pytest.mark.parametrize(
    ("own", "asked", "given"),
    [("4,6", "0,1", "4,6"), ("4,6", "1", "6"), (None, "1", "1"), ("", "0", "0"), ("4", "", "")],
)
def test_device_ids_index_assigned_devices(own, asked, given):
    environ = {} if own is None else {"CUDA_VISIBLE_DEVICES": own}
    assert process_environment(environ, {"CUDA_VISIBLE_DEVICES": asked})["CUDA_VISIBLE_DEVICES"] == given


@given(st.binary(max_size=200))
def test_frames_reject_invalid_data(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("frames") / "pipe"
    path.write_bytes(data)
    with path.open("rb") as pipe:
        try:
            for event in frames(pipe):
                assert isinstance(event, tuple)
        except ValueError:
            pass


# Ray.


def ray_config(tmp_path, address):
    words = ("--cluster.engine", "ray", "--cluster.ray-address", address, "--cluster.join-timeout", "0.5")
    return config(tmp_path, *words)


def test_unreachable_ray_cluster_is_refused(tmp_path, caplog, refusal, wording):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    caplog.set_level("INFO", "buckeye.launch")
    with refusal(RunError), other_nodes(ray_config(tmp_path, f"127.0.0.1:{port}")):
        pass
    assert caplog.messages[0] == wording


@pytest.mark.parametrize("address", ["localhost", "ray://", "10.0.0.1:port"])
def test_invalid_ray_address_is_refused(tmp_path, address):
    with pytest.raises(UsageError) as caught, other_nodes(ray_config(tmp_path, address)):
        pass
    assert (caught.value.code, caught.value.at) == ("BK-CONFIG-VALUE", "cluster.ray_address")


def test_killed_process_without_report_is_lost(tmp_path, monkeypatch, wording):
    monkeypatch.setattr(remote_process, "_REPORT_SECONDS", 0.01)
    sent = []
    process = remote_process.RemoteProcess(tmp_path / "stdout", lambda *words: sent.append(words))
    process.signal(signal.SIGKILL, session=True)
    assert process.wait() == -signal.SIGKILL
    assert sent == [(signal.SIGKILL, True)]
    assert process.lost == wording
    process.record_output(b"too late\n")
    process.record_heartbeats(b'{"pulse": 1.0}\n', 0.0)
    assert (tmp_path / "stdout").read_bytes() == b""
