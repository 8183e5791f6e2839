"""Servers that others wrote, each in an environment of its own, driven through whole rollouts.

They are installed once under `.cache/venvs` (`npm` and PyPI are asked only then).
"""

import asyncio
import json
import shutil
import subprocess
import sys
import venv

import pytest
from tests.mcp.environment.scripted import Scripted, native
from tests.mcp.environment.test_rollout import DONE, RAW, config, play, task
from tests.places import ROOT

from buckeye.base.process_guard import MARK
from buckeye.mcp.client.session import Deadlines, open_session
from buckeye.mcp.tasks.task_schema import StdioServer

CACHE = ROOT / ".cache" / "venvs"
EVERYTHING = "@modelcontextprotocol/server-everything@2026.8.31"
TIME = {"mcp-time": ("mcp-server-time==2026.10.19",), "mcp-time-1": ("mcp-server-time==2025.9.25", "mcp<2")}

pytestmark = pytest.mark.slow


@pytest.fixture(params=TIME)
def time_server(request):
    """The program of mcp-server-time, with the second and the first generation of the SDK."""
    home = CACHE / request.param
    program = home / "bin" / "mcp-server-time"
    if not program.exists():
        shutil.rmtree(home, ignore_errors=True)
        venv.create(home, with_pip=True)
        subprocess.run([home / "bin" / "pip", "install", "-q", *TIME[request.param]], check=True)
    return str(program)


@pytest.fixture
def everything_server():
    """The program of server-everything."""
    if shutil.which("npm") is None:
        pytest.skip("there is no npm")
    home = CACHE / "mcp-everything"
    program = home / "node_modules" / ".bin" / "mcp-server-everything"
    if not program.exists():
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        argv = ["npm", "install", "--silent", "--prefix", str(home), EVERYTHING]
        subprocess.run(argv, check=True)
    return str(program)


def graded_by_another(program):
    """A task on a server that grades nothing, beside one that does."""
    servers = {
        "theirs": {"command": program},
        "grader": {"command": sys.executable, "args": [RAW, "grade"]},
    }
    return task("", mcp_config=servers, setup_tool=[])


def test_a_rollout_on_mcp_server_time(time_server):
    mapping = {
        "convert": {
            "_tool": "convert_time",
            "_parser": {"positional": ["time", "to"]},
            "source_timezone": "UTC",
            "time": {"from_arg": "time"},
            "target_timezone": {"from_arg": "to", "transform": "lambda x: x.replace(' ', '_')"},
        }
    }
    policy = Scripted('<tool>convert("12:00", "America/New York")</tool>', "<tool>convert(12)</tool>", DONE)
    outcome = play(graded_by_another(time_server), policy, config(action_mappings=mapping))
    assert (outcome.reward, outcome.stop_reason, outcome.error) == (0.25, "done", None)
    assert (outcome.components["tool_calls"], outcome.components["tool_errors"]) == (2.0, 1.0)
    results = [message["content"] for message in policy.seen if message["role"] == "user"]
    assert "America/New_York" in results[1]
    assert "Error" in results[2]


def test_a_rollout_on_server_everything_by_native_calls(everything_server):
    mapping = {
        "add": {"_tool": "get-sum", "a": {"from_arg": "a"}, "b": {"from_arg": "b"}},
        "look": {"_tool": "get-tiny-image"},
    }
    settings = config(action_mappings=mapping, parser={"format": "tools"}, system_prompt="Add.")
    policy = Scripted(
        native("add", json.dumps({"a": 2, "b": 3})),
        native("add", '{"a": "x", "b": 3}'),
        native("look", "{}"),
        "5",
    )
    outcome = play(graded_by_another(everything_server), policy, settings)
    assert (outcome.reward, outcome.stop_reason) == (0.25, "answered")
    added, refused, seen = (message["content"] for message in policy.seen if message["role"] == "tool")
    assert added == "The sum of 2 and 3 is 5."
    assert "Error" in refused
    assert "(1 image not shown)" in seen
    assert policy.tools[0]["function"]["parameters"]["properties"]["a"]["type"] == "number"


def test_their_process_has_none_of_our_variables(everything_server, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "our-secret")
    monkeypatch.setenv("BUCKEYE_RUN_ID", "our-run")
    server = StdioServer(command=everything_server, env={"ONLY": "this"})

    async def run():
        async with open_session("theirs", server, deadlines=Deadlines()) as session:
            return (await session.call("get-env", {})).text

    seen = json.loads(asyncio.run(run()))
    assert seen.pop("ONLY") == "this"
    assert set(seen) <= {"PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ", MARK}


def initialised(program, folder):
    """What `rl init` says of its scripted rollout: action -> how it ended."""
    argv = [sys.executable, "-m", "buckeye", "rl", "init", "--command", program, "--json"]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return {trial["action"]: trial["ending"] for trial in json.loads(done.stdout)["proof"]["trials"]}


def test_rl_init_on_mcp_server_time(time_server, tmp_path):
    endings = initialised(time_server, tmp_path)
    assert endings == {"get_current_time": "worked", "convert_time": "worked"}


def test_rl_init_on_server_everything(everything_server, tmp_path):
    endings = initialised(everything_server, tmp_path)
    assert "failed" not in endings.values()
    assert endings["get-sum"] == endings["echo"] == "worked"
    assert "get-env" not in endings
