"""The same rollouts by `verifiers` v0, by v1, and by Buckeye itself.

The virtual environments are those in which dakota1890 is tested, made if they are missing.
"""

import asyncio
import hashlib
import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import httpx
import pytest
from vf_gym_servers import chat_server, mcp_server

from buckeye.envs.base import Reply
from buckeye.workers.opening import load_environment

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
REQUIREMENTS = ROOT / "environments" / "dakota1890" / "tests" / "verifiers_venvs"
SOURCES = (ROOT / "src", HERE.parent / "src")
KEY = "a-key-of-the-task"
REPLIES = ['<think>Open it.</think><tool>act("open")</tool>', "<think>Good.</think><tool>done()</tool>"]
CONFIG = """
system_prompt: "Call <tool>act(what)</tool>, and <tool>done()</tool> at the end."
action_mappings: {act: {_tool: act, _parser: {positional: [what]}, text: {from_arg: what}}}
"""

pytestmark = pytest.mark.slow


def python_with_verifiers(version):
    requirements = REQUIREMENTS / f"requirements-{version}.txt"
    target = ROOT / ".cache" / "venvs" / f"verifiers-{version}"
    stamp, python = target / ".requirements", target / "bin" / "python"
    wanted = hashlib.sha256(requirements.read_bytes() + sys.version.encode()).hexdigest()
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.rmtree(target, ignore_errors=True)
        venv.create(target, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "-r", requirements], check=True, timeout=900)
        stamp.write_text(wanted)
    return python


@pytest.fixture
def files(tmp_path):
    """Two tasks: one over HTTP with a key, one whose server cannot be started."""
    call = {"name": "evaluate"}
    with mcp_server(KEY) as url:
        http = {"url": f"{url}/mcp", "headers": {"X-Key": "$GYM_KEY"}}
        broken = {"command": sys.executable, "args": ["-c", "raise SystemExit('no display')"]}
        tasks = [
            {"id": "door", "prompt": "Open.", "mcp_config": {"s": http}, "setup_tool": {"name": "setup"}},
            {"id": "broken", "prompt": "Open.", "mcp_config": {"s": broken}},
        ]
        (tmp_path / "tasks.json").write_text(json.dumps([{**task, "evaluate_tool": call} for task in tasks]))
        (tmp_path / "gym.yaml").write_text(CONFIG)
        yield {"taskset": str(tmp_path / "tasks.json"), "config_path": str(tmp_path / "gym.yaml")}


@pytest.mark.parametrize("version", ["v0", "v1"])
def test_rollouts(version, files, tmp_path):
    python = python_with_verifiers(version)
    with chat_server(REPLIES) as url:
        job = {"base_url": f"{url}/v1", "args": files}
        (tmp_path / "job.json").write_text(json.dumps(job))
        done = subprocess.run(
            [
                python,
                HERE / "verifiers_venvs" / f"play_{version}.py",
                tmp_path / "job.json",
                tmp_path / "out.json",
            ],
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
    door, broken = sorted(
        json.loads((tmp_path / "out.json").read_text()), key=lambda one: one["task"] == "broken"
    )
    assert door["error"] is None
    assert door["reward"] == pytest.approx(0.8 * 0.5 + 0.1 + 0.1)
    expected = {"task_completion": 0.5, "tool_execution": 1.0, "format_compliance": 1.0}
    assert {name: door["metrics"][name] for name in expected} == expected
    assert any("You did {'text': 'open'}." in text for text in door["read"])
    assert door["replies"] in (2, None)
    assert "StartError" in broken["error"]
    assert "no display" in broken["error"]
    assert broken["reward"] in (0.0, None)
    assert KEY not in done.stdout + done.stderr + (tmp_path / "out.json").read_text()


def test_buckeye_plays_the_same(files, monkeypatch):
    monkeypatch.setenv("GYM_KEY", KEY)

    class Policy:
        async def chat(self, messages, *, tools=()):
            async with httpx.AsyncClient(base_url=url) as client:
                answer = await client.post("/v1/chat/completions", json={"messages": list(messages)})
            message = answer.json()["choices"][0]["message"]
            return Reply(text=message["content"], finish_reason="stop", message=message)

    gym = load_environment("buckeye-vf-gym", **files)
    door, broken = gym.tasks("train")
    with chat_server(REPLIES) as url:
        outcome = asyncio.run(gym.rollout(door, Policy()))
    assert (outcome.error, outcome.reward) == (None, pytest.approx(0.6))
    assert asyncio.run(gym.rollout(broken, Policy())).reward is None
