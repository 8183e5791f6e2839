"""The gateway that a run starts for its tasks is one of its processes: looked after, and ended with it."""

import json
import os
import signal

import pytest
from tests.mcp.environment.leaks import assert_none_left
from tests.mcp.gateway.test_runtimes import FAKE
from tests.places import ROOT
from tests.ports import free_port
from tests.run.test_supervision import child, ended_well, events, start, trained, wait_for

__all__ = ["start"]  # a fixture

SERVER = ROOT / "tests/mcp/environment/raw_server.py"
CONFIG = """
system_prompt: Act.
parser: {use_thinking: false}
action_mappings: {act: {_tool: act, text: {from_arg: text}}}
defaults: {max_turns: 2}
"""


@pytest.fixture
def gym(runner):
    """Tasks whose server is an image behind a gateway of this machine, which runs it with a fake docker."""
    port = free_port()
    server = {"url": f"http://localhost:{port}/mcp", "headers": {"Mcp-Image": "org/env:1"}}
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
        FAKE.format(python=os.sys.executable, home=str(runner.root / "docker"), server=str(SERVER))
    )
    docker.chmod(0o755)
    runner.env |= {
        "PATH": f"{docker.parent}:{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(runner.root / "cache"),
        "HOME": str(runner.root),
    }
    runner.env.pop("BUCKEYE_API_KEY", None)
    args = json.dumps({"taskset": "tasks.json", "config_path": "gym.yaml"})
    return ("--orchestrator.env.0.id", "buckeye-vf-gym", "--orchestrator.env.0.args", args)


@pytest.mark.slow
def test_a_run_goes_on_without_its_gateway_for_a_while(runner, start, gym):
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
