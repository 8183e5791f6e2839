"""A gateway is started for tasks that need one, and only then."""

import json
import os
import signal
import subprocess
import sys

import httpx
import pytest
from tests.mcp.gateway.client import Client, scripted
from tests.ports import free_port
from tests.waiting import wait_for

from buckeye.config.environments import EnvConfig, TrainEnvConfig
from buckeye.errors import RunError, UsageError
from buckeye.launch.mcp_gateways import ensure_gateway, task_gateway
from buckeye.launch.plan import Site
from buckeye.launch.preflight.devices import Machine
from buckeye.launch.worker_hosts import run_hosts


def answers(port):
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    except httpx.HTTPError:
        return False


def test_it_is_started_once_used_and_ended(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    port = free_port()
    urls = [
        f"http://localhost:{port}/mcp",
        f"http://127.0.0.1:{port}/mcp",
        "https://mcp.example/mcp",
        "",
        "http://[",
    ]
    words = ["--command", scripted()]
    key = {"BUCKEYE_API_KEY": "of the run"}
    with ensure_gateway(urls, tmp_path / "logs" / "gateway.log", words=words, env=key) as started:
        assert started == [port]
        assert Client(urls[0], Authorization="Bearer of the run").open().call("recall") == []
        with ensure_gateway(urls, tmp_path / "other.log", words=words) as again:
            assert again == []  # something listens there already
        assert answers(port)
    assert not answers(port)
    assert "Gateway stopped" in (tmp_path / "logs" / "gateway.log").read_text()


def test_tasks_say_where_it_is_needed_and_players_get_its_key(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("BUCKEYE_API_KEY", raising=False)
    port = free_port()
    headers = {"Authorization": "Bearer $buckeye_API_KEY"}
    task = {
        "id": "one",
        "prompt": "Win.",
        "mcp_config": {
            "far": {"url": "https://mcp.example/mcp"},
            "near": {"url": f"http://localhost:{port}/mcp", "headers": headers},
            "too": {"url": f"http://127.0.0.1:{port}/mcp", "headers": headers},
        },
        "evaluate_tool": {"name": "evaluate"},
    }
    (tmp_path / "tasks.json").write_text(json.dumps(task))
    played = [
        EnvConfig(id="harleycooper/dakota1890", args={"taskset": "no such file"}),
        EnvConfig(id="buckeye/buckeye-vf-gym@1", args={"taskset": str(tmp_path / "tasks.json")}),
    ]
    with task_gateway(played[:1], tmp_path / "log", rollouts=8) as nothing:
        assert nothing == {}
    with task_gateway(played, tmp_path / "log", rollouts=100) as given:
        (key,) = given.values()
        assert given == {"BUCKEYE_API_KEY": key}
        url = f"http://127.0.0.1:{port}/mcp"
        assert httpx.post(url, json={}).status_code == 401
        assert httpx.post(url, json={}, headers={"Authorization": f"Bearer {key}"}).status_code != 401
        key_header = {"Authorization": f"Bearer {key}"}
        assert httpx.get(url.replace("/mcp", "/status"), headers=key_header).json()["limit"] == 200
        with monkeypatch.context() as patch:
            patch.setenv("BUCKEYE_API_KEY", key)
            with task_gateway(played, tmp_path / "log", rollouts=8) as again:
                assert again == {}
        for wrong in ({}, {"BUCKEYE_API_KEY": "another"}):
            with monkeypatch.context() as patch:
                for name, value in wrong.items():
                    patch.setenv(name, value)
                other = task_gateway(played, tmp_path / "log", rollouts=8)
                with pytest.raises(UsageError, match="wants a key"), other:
                    pass
    assert not answers(port)
    assert key not in (tmp_path / "log").read_text()


def test_an_environment_by_its_path_is_none_of_a_hub(tmp_path):
    with task_gateway([EnvConfig(id="sub/deep/env.py")], tmp_path / "log", rollouts=8) as nothing:
        assert nothing == {}


def test_nothing_is_started_for_servers_elsewhere(tmp_path):
    with ensure_gateway(["https://mcp.example/mcp", "http://10.0.0.1:8765/mcp"], tmp_path / "log") as started:
        assert started == []
    assert not (tmp_path / "log").exists()


def test_one_that_cannot_start_is_an_error_with_its_words(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    url = f"http://127.0.0.1:{free_port()}/mcp"
    words = ["--command", "no-such-program"]
    needed = ensure_gateway([url], tmp_path / "log", words=words)
    with pytest.raises(RunError, match="exit code 2") as failure, needed:
        pass
    assert "there is no program 'no-such-program'" in str(failure.value)


def test_it_dies_with_the_run(tmp_path):
    port = free_port()
    script = (
        "import sys, time\nfrom pathlib import Path\n"
        "from buckeye.launch.mcp_gateways import ensure_gateway\n"
        f"with ensure_gateway(['http://127.0.0.1:{port}/mcp'], Path('log'), words=['--command', 'cat']):\n"
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


def site(number):
    return Site(
        name=f"node {number}",
        machine=Machine(cores=1, gpus=()),
        choose_ports=lambda count: [30_000 + number] * count,
        address=f"10.0.0.{number}",
    )


def placed(tmp_path, *, url, placement):
    task = {"id": "one", "prompt": "Win.", "mcp_config": {"near": {"url": url}}}
    (tmp_path / "tasks.json").write_text(json.dumps({**task, "evaluate_tool": {"name": "evaluate"}}))
    args = {"taskset": str(tmp_path / "tasks.json")}
    return TrainEnvConfig(id="buckeye-vf-gym", args=args, placement=placement)


def test_tasks_that_name_a_server_here_are_not_placed(tmp_path):
    env = placed(tmp_path, url="https://mcp.example/mcp", placement=[1])
    hosts = run_hosts([env], rollouts=8, sites={1: site(1)}, address="10.0.0.9")
    assert [(role.kind, role.node) for role in hosts.roles] == [("workers", 1)]
    near = placed(tmp_path, url=f"http://localhost:{free_port()}/mcp", placement=[1])
    with pytest.raises(UsageError, match="which other nodes do not reach"):
        run_hosts([near], rollouts=8, sites={1: site(1)}, address="10.0.0.9")
