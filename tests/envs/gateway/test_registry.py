"""The whole way: an image built without a daemon, served by a real registry, run without a daemon, and played
through the gateway by the environment of the configuration."""

import asyncio
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from buckeye.envs.mcp.environment import load_environment
from tests.envs.gateway.client import gateway, processes_with, wait_until
from tests.envs.mcp.scripted import Scripted

ENVIRONMENT = Path(__file__).parents[3] / "environments" / "text_2048"
NEEDED = ("docker-registry", "buildah", "ldd")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1_800),
    pytest.mark.skipif(
        sys.platform != "linux" or os.geteuid() != 0 or any(shutil.which(name) is None for name in NEEDED),
        reason="needs root on Linux and: apt-get install docker-registry buildah",
    ),
]

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
            environment = load_environment(
                taskset=str(tasks), config_path=str(ENVIRONMENT / "text_2048.yaml")
            )
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
    wait_until(lambda: not processes_with(str(tmp_path)), "processes are left")


def python_tree(tree):
    """A root file system with this Python and text_2048: what its Dockerfile makes, without a base image."""
    prefix, version = Path(sys.base_prefix), f"python{sys.version_info.major}.{sys.version_info.minor}"
    home = tree / str(prefix).lstrip("/")
    unused = shutil.ignore_patterns(
        "test", "tests", "idlelib", "ensurepip", "site-packages", "__pycache__", "*.a"
    )
    shutil.copytree(prefix / "lib" / version, home / "lib" / version, ignore=unused)
    (home / "bin").mkdir(parents=True)
    shutil.copy2(prefix / "bin" / version, home / "bin" / version)
    site = tree / "app" / "site"
    words = ["--quiet", "--disable-pip-version-check", "--target", str(site), str(ENVIRONMENT)]
    subprocess.run([sys.executable, "-m", "pip", "install", *words], check=True)
    for library in needed_libraries([home / "bin" / version, *tree.rglob("*.so*")]):
        to = tree / str(library).lstrip("/")
        if not to.exists():
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(library.resolve(), to)
    (tree / "tmp").mkdir(mode=0o777)
    (tree / "server").symlink_to(home.relative_to(tree) / "bin" / version)
    return tree


def needed_libraries(files):
    found = set()
    for file in files:
        listed = subprocess.run(["ldd", str(file)], capture_output=True, text=True, check=False).stdout
        found |= {Path(path) for path in re.findall(r"(/\S+) \(0x", listed)}
    return found


def build(tree, state, image):
    """As `docker build` and `docker push`, by buildah, whose state is in a folder of ours."""

    def buildah(*words):
        command = ["buildah", "--root", str(state / "root"), "--runroot", str(state / "run")]
        command += ["--storage-driver", "vfs", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout.strip()

    container = buildah("from", "scratch")
    buildah("copy", container, str(tree), "/")
    home = str(Path(sys.base_prefix))
    wishes = ["--env", f"PYTHONHOME={home}", "--env", "PYTHONPATH=/app/site", "--workingdir", "/app"]
    wishes += ["--entrypoint", '["/server", "-m", "text_2048"]', "--user", "nobody"]
    buildah("config", *wishes, container)
    buildah("commit", "--format", "oci", container, image)
    buildah("push", "--tls-verify=false", image)


@contextmanager
def registry(folder):
    """Debian's docker-registry on a port of its own."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{listener.getsockname()[1]}"
    folder.mkdir()
    storage = {"filesystem": {"rootdirectory": str(folder / "data")}}
    settings = {"version": 0.1, "storage": storage, "http": {"addr": host}, "log": {"level": "warn"}}
    (folder / "config.yml").write_text(json.dumps(settings))
    with (folder / "log").open("w") as log:
        command = ["docker-registry", "serve", str(folder / "config.yml")]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: answers(f"http://{host}/v2/"), "no registry", (folder / "log").read_text)
        yield host
    finally:
        process.kill()
        process.wait()


def answers(url):
    try:
        return httpx.get(url).status_code == 200
    except httpx.HTTPError:
        return False
