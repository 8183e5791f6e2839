"""A gateway is started for tasks that need one, and only for those."""

import json
import os
import signal
import subprocess
import sys

import httpx
import pytest
from tests.mcp.environment.leaks import assert_none_left
from tests.mcp.gateway.test_runtimes import FAKE
from tests.places import ROOT
from tests.ports import free_port
from tests.run.test_supervision import child, ended_well, events, trained
from tests.waiting import wait_for
from tests.workers.workers.test_elsewhere import site

from buckeye.config.environments import EnvConfig, TrainEnvConfig
from buckeye.errors import RunError, UsageError
from buckeye.launch.mcp_gateways import local_gateway
from buckeye.launch.worker_hosts import plan_environment_processes

pytestmark = pytest.mark.e2e


def answers(port):
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    except httpx.HTTPError:
        return False


def gateway_for(tmp_path, *urls, headers=None):
    """Return three environments. Only the last one needs a gateway, at these addresses."""
    servers = {f"server-{n}": {"url": url, "headers": headers or {}} for n, url in enumerate(urls)}
    task = {"prompt": "Win.", "mcp_config": servers, "evaluate_tool": {"name": "evaluate"}}
    (tmp_path / "tasks.json").write_text(json.dumps(task))
    return [
        EnvConfig(id="sub/deep/env.py"),
        EnvConfig(id="harleycooper/dakota1890", args={"dataset": "no such file"}),
        EnvConfig(id="buckeye/buckeye-vf-gym@1", args={"dataset": str(tmp_path / "tasks.json")}),
    ]


def test_local_gateway_starts_only_for_local_urls_and_sets_key(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("BUCKEYE_API_KEY", "")  # so that it is unset again after this test
    monkeypatch.delenv("BUCKEYE_API_KEY")
    log = tmp_path / "log"
    with local_gateway(gateway_for(tmp_path, "https://mcp.example/mcp"), log, rollouts=8):
        assert "BUCKEYE_API_KEY" not in os.environ
    assert not log.exists()
    port = free_port()
    url, headers = f"http://127.0.0.1:{port}/mcp", {"Authorization": "Bearer $buckeye_API_KEY"}
    urls = ("https://mcp.example/mcp", url, url.replace("127.0.0.1", "localhost"))
    played = gateway_for(tmp_path, *urls, headers=headers)
    with local_gateway(played, log, rollouts=100):
        key = os.environ["BUCKEYE_API_KEY"]
        authorized = {"Authorization": f"Bearer {key}"}
        assert httpx.post(url, json={}).status_code == 401
        assert httpx.post(url, json={}, headers=authorized).status_code != 401
        status = httpx.get(url.replace("/mcp", "/status"), headers=authorized).json()
        assert status["limit"] == 200
        monkeypatch.setenv("BUCKEYE_API_KEY", "another")
        with pytest.raises(UsageError, match="key"), local_gateway(played, log, rollouts=8):
            pass
        monkeypatch.setenv("BUCKEYE_API_KEY", key)
        with local_gateway(played, log, rollouts=8):
            assert os.environ["BUCKEYE_API_KEY"] == key
    assert "BUCKEYE_API_KEY" not in os.environ
    assert not answers(port)
    assert "Gateway stopped" in log.read_text()
    assert key not in log.read_text()


def test_gateway_that_cannot_start_is_run_error_with_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))  # without programs, no runtime for images works
    url = f"http://127.0.0.1:{free_port()}/mcp"
    needed = gateway_for(tmp_path, url, headers={"Env-Path": "/bin"})
    with (
        pytest.raises(RunError, match="exit code 2") as failure,
        local_gateway(needed, tmp_path / "log", rollouts=1),
    ):
        pass
    assert "clients may not set PATH" in str(failure.value)


def test_gateway_ends_when_run_is_killed(tmp_path):
    port = free_port()
    gateway_for(tmp_path, f"http://127.0.0.1:{port}/mcp")
    script = (
        "import time\nfrom pathlib import Path\n"
        "from buckeye.config.environments import EnvConfig\n"
        "from buckeye.launch.mcp_gateways import local_gateway\n"
        "environment = EnvConfig(id='mcp', args={'dataset': 'tasks.json'})\n"
        "with local_gateway([environment], Path('log'), rollouts=1):\n"
        "    print('ready', flush=True)\n    time.sleep(600)\n"
    )
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    run = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, env=env, stdout=subprocess.PIPE)
    try:
        assert run.stdout.readline() == b"ready\n"
        assert answers(port)
        run.send_signal(signal.SIGKILL)
        run.wait()
        wait_for(lambda: not answers(port), "the gateway lives on")
    finally:
        run.kill()
        run.wait()
        run.stdout.close()


def placed(tmp_path, *, url, placement):
    task = {"id": "one", "prompt": "Win.", "mcp_config": {"near": {"url": url}}}
    (tmp_path / "tasks.json").write_text(json.dumps({**task, "evaluate_tool": {"name": "evaluate"}}))
    args = {"dataset": str(tmp_path / "tasks.json")}
    return TrainEnvConfig(id="mcp", args=args, placement=placement)


def test_placement_refuses_tasks_with_local_servers(tmp_path, refusal):
    env = placed(tmp_path, url="https://mcp.example/mcp", placement=[1])
    hosts = plan_environment_processes([env], rollouts=8, plan_nodes={1: site(1)}, address="10.0.0.9")
    assert [(role.kind, role.node) for role in hosts.roles] == [("workers", 1)]
    near = placed(tmp_path, url=f"http://localhost:{free_port()}/mcp", placement=[1])
    with refusal(UsageError):
        plan_environment_processes([near], rollouts=8, plan_nodes={1: site(1)}, address="10.0.0.9")


SERVER = ROOT / "tests/mcp/environment/raw_server.py"
CONFIG = """
system_prompt: Act.
parser: {use_thinking: false}
action_mappings: {act: {_tool: act, text: {from_arg: text}}}
defaults: {max_turns: 2}
"""


@pytest.fixture
def gym(runner):
    """Tasks whose server is an image behind a local gateway, which runs it with a fake docker."""
    port = free_port()
    server = {"url": f"http://localhost:{port}/mcp", "headers": {"Mcp-Image": "org/env:1"}}
    server["headers"]["Authorization"] = "Bearer $buckeye_API_KEY"
    tasks = [
        {
            "id": f"task-{n}",
            "prompt": "Win.",
            "mcp_config": {"board": server},
            "setup_tool": {"name": "setup"},
            "evaluate_tool": {"name": "evaluate"},
        }
        for n in range(20)
    ]
    (runner.root / "tasks.json").write_text(json.dumps(tasks))
    (runner.root / "gym.yaml").write_text(CONFIG)
    for folder in ("bin", "docker"):
        (runner.root / folder).mkdir()
    docker = runner.root / "bin" / "docker"
    docker.write_text(
        FAKE.format(python=sys.executable, home=str(runner.root / "docker"), server=str(SERVER))
    )
    docker.chmod(0o755)
    runner.env |= {
        "PATH": f"{docker.parent}:{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(runner.root / "cache"),
        "HOME": str(runner.root),
    }
    runner.env.pop("BUCKEYE_API_KEY", None)
    args = json.dumps({"dataset": "tasks.json", "config_path": "gym.yaml"})
    return ("--orchestrator.env.0.id", "mcp", "--orchestrator.env.0.args", args)


@pytest.mark.slow
def test_run_continues_after_gateway_restart(runner, start, gym):
    words = (*gym, "--orchestrator.seq-len", 1024, "--orchestrator.zero-spread", "keep")
    running = start(runner.rl("out", *words, steps=8))
    wait_for(lambda: len(trained(runner)) >= 2, "the second step")
    first = child(runner, "gateway 0")
    os.kill(first.pid, signal.SIGKILL)
    ended_well(running)
    assert sorted(set(trained(runner))) == list(range(8))
    restarts = [event for event in events(runner) if event["event"] == "restart"]
    assert [event["process"] for event in restarts] == ["gateway 0"]
    assert "SIGKILL" in restarts[0]["cause"]
    output = (runner.root / "out" / "logs" / "gateway.stdout").read_text()
    assert output.count("Gateway ready") == 2
    assert "Gateway stopped" in output
    assert_none_left(str(SERVER))
