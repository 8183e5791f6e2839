"""The whole way: an image built without a daemon, served by a real registry, run without a daemon, and played
through the gateway by the environment of the configuration."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.mcp.environment.leaks import assert_none_left
from tests.mcp.environment.scripted import Scripted
from tests.mcp.gateway.client import gateway
from tests.mcp.images.local_registry import TEXT_2048, needs_registry, python_tree, registry

from buckeye.mcp.environment import load_environment

pytestmark = [pytest.mark.slow, needs_registry]

TASK = """
{
  "id": "task-001",
  "prompt": "Play 2048. Reach a tile of 16.",
  "mcp_config": {
    "buckeye": {
      "url": "http://localhost:PORT/mcp",
      "headers": {
        "Authorization": "Bearer $buckeye_API_KEY",
        "Mcp-Image": "IMAGE"
      }
    }
  },
  "setup_tool": {
    "name": "setup",
    "arguments": {
      "name": "board",
      "seed": 3
    }
  },
  "evaluate_tool": {
    "name": "evaluate",
    "arguments": {
      "name": "max_number",
      "target": 16
    }
  },
  "metadata": {
    "difficulty": "easy",
    "category": "task_type"
  }
}
"""


def test_text_2048_from_a_registry_without_a_daemon(tmp_path, monkeypatch):
    with registry(tmp_path / "registry") as host:
        image = f"{host}/your-org/text-2048:latest"
        build(python_tree(tmp_path / "tree"), tmp_path / "buildah", image)
        key = {"BUCKEYE_API_KEY": "key-of-the-gateway"}
        with gateway(tmp_path / "gateway", "--runtime", "chroot", env=key) as running:
            monkeypatch.setenv("BUCKEYE_API_KEY", "key-of-the-gateway")
            tasks = tmp_path / "tasks.json"
            tasks.write_text(TASK.replace("PORT", str(running.port)).replace("IMAGE", image))
            environment = load_environment(taskset=str(tasks), config_path=str(TEXT_2048 / "text_2048.yaml"))
            (task,) = environment.tasks("train")

            def policy():
                return Scripted(
                    *[f'<tool>move("{way}")</tool>' for way in ("left", "down", "right", "down") * 25]
                )

            async def group():
                return await asyncio.gather(*(environment.rollout(task, policy()) for _ in range(4)))

            outcomes = asyncio.run(group())
            for outcome in outcomes:
                assert outcome.error is None, outcome.error
                assert outcome.reward > 0.5
            assert len({outcome.reward for outcome in outcomes}) == 1  # a group shares its board
            log = running.log()
            assert len(re.findall(r"is unpacked", log)) == 1
            assert len(re.findall(r"started in", log)) == 4
            assert "key-of-the-gateway" not in log
            running.until(
                lambda: running.status(Authorization="Bearer key-of-the-gateway")["running"] == 0, log
            )
    assert_none_left(str(tmp_path))


def build(tree, state, image):
    """As `docker build` and `docker push`, by buildah, whose state is in a folder of ours."""

    def buildah(*words):
        command = ["buildah", "--root", str(state / "root"), "--runroot", str(state / "run")]
        command += ["--storage-driver", "vfs", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    container = buildah("from", "scratch")
    buildah("copy", container, str(tree), "/")
    home = str(Path(sys.base_prefix))
    wishes = ["--env", f"PYTHONHOME={home}", "--env", "PYTHONPATH=/app/site", "--workingdir", "/app"]
    wishes += ["--entrypoint", '["/server", "-m", "text_2048"]', "--user", "nobody"]
    buildah("config", *wishes, container)
    buildah("commit", "--format", "oci", container, image)
    buildah("push", "--tls-verify=false", image)
