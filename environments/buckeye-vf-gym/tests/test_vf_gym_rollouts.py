"""Equal rollouts by `verifiers` v0, by v1, and by Buckeye itself."""

import asyncio
import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from environments.dakota1890.tests.verifiers_python import verifiers_python
from tests.evaluation.chat_server import chat_server
from tests.local_server import LocalServer, QuietHandler
from tests.mcp.environment.scripted import Scripted

from buckeye.workers.loading import load_environment

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
SCRIPTS = ROOT / "environments" / "dakota1890" / "tests" / "verifiers_venvs"
SOURCES = (ROOT / "src", HERE.parent / "src")
KEY = "a-key-of-the-task"
REPLIES = ['<think>Open it.</think><tool>act("open")</tool>', "<think>Good.</think><tool>done()</tool>"]
CONFIG = """
system_prompt: "Call <tool>act(what)</tool>, and <tool>done()</tool> at the end."
action_mappings: {act: {_tool: act, _parser: {positional: [what]}, text: {from_arg: what}}}
"""

TOOLS = ("setup", "act", "evaluate")

pytestmark = pytest.mark.slow


def reply(body, number):
    """Return the next scripted reply, by the number of replies in the conversation."""
    said = sum(message["role"] == "assistant" for message in body["messages"])
    message = {"role": "assistant", "content": REPLIES[min(said, len(REPLIES) - 1)]}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    answer = {"id": "a", "object": "chat.completion", "created": 1, "model": "scripted"}
    return 200, json.dumps({**answer, "choices": [choice], "usage": usage})


def mcp_server(key):
    """Run an MCP server that refuses requests without the header `X-Key: key`.

    An action is rewarded with 0.5.
    """
    sessions = {}

    class Handler(QuietHandler):
        protocol_version = "HTTP/1.1"

        def send(self, value, status=200, **headers):
            body = b"" if value is None else json.dumps(value).encode()
            self.answer(status, body, Content_Type="application/json", **headers)

        def do_GET(self):
            self.send(None, 405)

        def do_DELETE(self):
            self.send(None, 200)

        def do_POST(self):
            request = json.loads(self.body())
            if self.headers["X-Key"] != key:
                return self.send({"error": "no key"}, 401)
            if "id" not in request:
                return self.send(None, 202)
            session = self.headers.get("Mcp-Session-Id") or uuid.uuid4().hex
            result = self.result(request, sessions.setdefault(session, []))
            answer = {"jsonrpc": "2.0", "id": request["id"], "result": result}
            return self.send(answer, Mcp_Session_Id=session)

        def result(self, request, acts):
            if request["method"] == "initialize":
                info = {"name": "test", "version": "1"}
                capabilities = {"tools": {}}
                return {"protocolVersion": "2025-06-18", "capabilities": capabilities, "serverInfo": info}
            if request["method"] == "tools/list":
                return {"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in TOOLS]}
            name, arguments = request["params"]["name"], request["params"].get("arguments")
            if name == "act":
                acts.append(arguments)
            texts = {"setup": "The door is shut.", "act": f"You did {arguments}.", "evaluate": "graded"}
            structured = {"reward": 0.5 * bool(acts)} if name == "evaluate" else {}
            return {"content": [{"type": "text", "text": texts[name]}], "structuredContent": structured}

    return LocalServer(Handler)


@pytest.fixture
def files(tmp_path):
    """Files of two tasks: one over HTTP with a key, one whose server cannot start."""
    call = {"name": "evaluate"}
    with mcp_server(KEY) as server:
        http = {"url": f"{server.url}/mcp", "headers": {"X-Key": "$GYM_KEY"}}
        broken = {"command": sys.executable, "args": ["-c", "raise SystemExit('no display')"]}
        tasks = [
            {"id": "door", "prompt": "Open.", "mcp_config": {"s": http}, "setup_tool": {"name": "setup"}},
            {"id": "broken", "prompt": "Open.", "mcp_config": {"s": broken}},
        ]
        (tmp_path / "tasks.json").write_text(json.dumps([{**task, "evaluate_tool": call} for task in tasks]))
        (tmp_path / "gym.yaml").write_text(CONFIG)
        yield {"dataset": str(tmp_path / "tasks.json"), "config_path": str(tmp_path / "gym.yaml")}


@pytest.mark.parametrize("version", ["v0", "v1"])
def test_verifiers_runs_rollouts(version, files, tmp_path):
    python = verifiers_python(version)
    with chat_server(reply) as (url, _):
        job = {
            "env": "buckeye-vf-gym",
            "args": files,
            "splits": ["train"],
            "base_url": url,
            "model": "scripted",
        }
        job |= {"tasks": 2, "rollouts": 1, "sampling": {"max_tokens": 64}, "harness": "buckeye-vf-gym"}
        (tmp_path / "job.json").write_text(json.dumps(job))
        script = SCRIPTS / f"play_{version}.py"
        done = subprocess.run(
            [python, script, tmp_path / "job.json", tmp_path / "out.json"],
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(tmp_path),
                "PYTHONPATH": os.pathsep.join(map(str, SOURCES)),
                "ENGINE_KEY": "engine",
                "GYM_KEY": KEY,
            },
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    played = {
        rollout["task_id"]: rollout for rollout in json.loads((tmp_path / "out.json").read_text())["train"]
    }
    door, broken = played["door"], played["broken"]
    assert door["error"] is None
    assert door["reward"] == pytest.approx(0.8 * 0.5 + 0.1 + 0.1)
    expected = {"task_completion": 0.5, "tool_execution": 1.0, "format_compliance": 1.0}
    assert {name: door["metrics"][name] for name in expected} == expected
    assert any("You did {'text': 'open'}." in text for text in door["read"])
    assert door["replies"] == 2
    assert "StartError" in broken["error"]
    assert "no display" in broken["error"]
    assert broken["reward"] in (0.0, None)
    assert KEY not in done.stdout + done.stderr + (tmp_path / "out.json").read_text()


def test_buckeye_runs_the_same_rollouts(files, monkeypatch):
    monkeypatch.setenv("GYM_KEY", KEY)

    gym = load_environment("buckeye-vf-gym", **files)
    door, broken = gym.tasks("train")
    outcome = asyncio.run(gym.rollout(door, Scripted(*REPLIES)))
    assert (outcome.error, outcome.reward) == (None, pytest.approx(0.6))
    assert asyncio.run(gym.rollout(broken, Scripted(*REPLIES))).reward is None
