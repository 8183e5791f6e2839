"""Every command of `commands.sh`, unchanged, in an order in which a user could run them.

A local registry replaces Docker Hub, and a local server the Hugging Face hub. The command that
rents machines fails and names the missing key.
"""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tests.mcp.images.local_registry import (
    builder_environment,
    needs_registry,
    python_dockerfile,
    python_tree,
    registry,
)
from tests.run.fake_hub import FakeHub

from buckeye.mcp.config import load_gym_config
from buckeye.mcp.tasks.lock_file import read_lock

pytestmark = [pytest.mark.slow, needs_registry]

PAGE = Path(__file__).with_name("commands.sh")
COMMANDS = [
    line.partition("#")[0].strip() for line in PAGE.read_text().splitlines() if line.startswith("buckeye ")
]
TASK = {
    "id": "task-001",
    "prompt": "Complete the task description",
    "mcp_config": {
        "buckeye": {
            "url": "http://localhost:8765/mcp",
            "headers": {"Authorization": "Bearer $buckeye_API_KEY", "Mcp-Image": "your-org/your-env:latest"},
        }
    },
    "setup_tool": {"name": "setup", "arguments": {"name": "board", "seed": 3}},
    "evaluate_tool": {"name": "evaluate", "arguments": {"name": "max_number", "target": 16}},
    "metadata": {"difficulty": "easy", "category": "task_type"},
}
LOCK = """\
image: "my-org/my-env:latest"
primary_dataset:
  name: "my-org/my-tasks"
  task_count: 50
  updated_at: "2024-01-01T00:00:00"
"""


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Registry with both images of the page."""
    place = tmp_path_factory.mktemp("images")
    folder = place / "text_2048"
    python_tree(folder / "tree")
    python_dockerfile(folder, "text_2048")
    env = {"PATH": os.environ["PATH"], "HOME": str(place), **builder_environment(place / "buildah")}
    with registry(place / "registry") as host:
        for name in ("hudpython/hud-text-2048:latest", "library/my-env:latest"):
            for words in (["build", ".", "--builder", "buildah", "--tag", f"{host}/{name}"], ["push"]):
                argv = [sys.executable, "-m", "buckeye", "env", *words]
                subprocess.run(argv, cwd=folder, env=env, check=True)
        yield host


@pytest.fixture(scope="module")
def typed(images, tmp_path_factory):
    """Results of the commands, run in order in one folder: command -> (exit code, stdout, stderr)."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "tasks.json").write_text(json.dumps([TASK | {"id": f"task-{n:03}"} for n in range(64)]))
    (folder / "buckeye.lock.yaml").write_text(LOCK)
    (folder / ".env").write_text("BUCKEYE_API_KEY=your-api-key\nWANDB_API_KEY=your-wandb-api-key\n")
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path_factory.mktemp("home")),
        "BUCKEYE_REGISTRY_MIRROR": images,
        "HF_TOKEN": "hf_of_the_test",
    }
    ends = {}
    with FakeHub() as hub:
        env["HF_ENDPOINT"] = hub.url

        def run(command):
            argv = [sys.executable, "-m", "buckeye", *shlex.split(command)[1:]]
            ends[command] = subprocess.run(
                argv, cwd=folder, env=env, capture_output=True, text=True, check=False,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip

        for command in COMMANDS:
            if command.endswith("-o configs/my-env.yaml"):
                (folder / "configs" / "my-env.yaml").unlink()  # the quick start has made it
            if "configs/2048.yaml" in command:
                (folder / "configs" / "hud-text-2048.yaml").rename(folder / "configs" / "2048.yaml")
            run(command)
    return folder, ends, hub


def test_every_command_ends_as_it_should(typed):
    """Commands of `rl` fail and name the cause: no model, a hosted model's training, no GPUs, no key."""
    _, ends, _ = typed
    assert len(ends) == len(COMMANDS) == 12
    for command, end in ends.items():
        assert "Traceback" not in end.stderr, command
        if " init " in command or command.startswith("buckeye hf"):
            assert end.returncode == 0, end.stdout + end.stderr
        else:
            assert (end.returncode in (1, 2), "error: " in end.stderr) == (True, True), end.stderr
        assert " init " not in command or "move  worked" in end.stdout
    missing = {
        "buckeye rl": "model",
        "buckeye rl --model gpt-4o-mini --dataset my-org/my-tasks": "buckeye eval",
        "buckeye rl --config configs/2048.yaml --gpus 4xH100": "4xH100",
        "buckeye rl --gpus 4xH100 --provider prime": "",
    }
    for command, named in missing.items():
        assert named in ends[command].stderr


def test_what_init_and_hf_made(typed):
    folder, _, hub = typed
    for name in ("my-env", "2048"):
        assert set(load_gym_config(folder / "configs" / f"{name}.yaml").actions) == {"move", "done"}
    private = {"my-org/my-tasks": False, "my-org/my-dataset": False, "my-org/private-dataset": True}
    assert set(hub.files) == set(private)
    assert {name: bool(hub.private[name]) for name in private} == private
    assert list((folder / "local-dataset").rglob("*.parquet"))
    assert read_lock(folder / "buckeye.lock.yaml").primary_dataset.task_count == 64
