"""Every command of `commands.sh`, as it is printed there, in an order that a person could have typed them in.

A registry on this machine stands for Docker Hub, a server on it for the Hugging Face hub. There is no key to
rent machines with, so that command ends with what is missing.
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
from buckeye.mcp.tasks.lock import read_lock

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
    """A registry with both images of the page."""
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
    """Each command in one folder, one after the other: command -> (exit code, stdout, stderr)."""
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


def test_the_page_has_so_many_commands():
    assert len(COMMANDS) == 12


@pytest.mark.parametrize("command", [one for one in COMMANDS if " init " in one])
def test_init(typed, command):
    _folder, ends, _ = typed
    assert ends[command].returncode == 0, ends[command].stdout + ends[command].stderr
    assert "move  worked" in ends[command].stdout


def test_what_init_wrote(typed):
    folder, _, _ = typed
    for name in ("my-env", "2048"):
        assert set(load_gym_config(folder / "configs" / f"{name}.yaml").actions) == {"move", "done"}


@pytest.mark.parametrize("command", [one for one in COMMANDS if one.startswith("buckeye hf")])
def test_hf(typed, command):
    _, ends, _ = typed
    assert ends[command].returncode == 0, ends[command].stdout + ends[command].stderr


def test_what_hf_made(typed):
    folder, _, hub = typed
    assert set(hub.files) == {"my-org/my-tasks", "my-org/my-dataset", "my-org/private-dataset"}
    assert hub.private["my-org/private-dataset"]
    assert not hub.private["my-org/my-dataset"]
    assert list((folder / "local-dataset").rglob("*.parquet"))
    assert read_lock(folder / "buckeye.lock.yaml").primary_dataset.task_count == 64


def test_rl_without_a_terminal_finds_everything_but_a_model(typed):
    """Configuration and dataset come from the folder and the hub, which has no model to fetch."""
    end = typed[1]["buckeye rl"]
    assert end.returncode in (1, 2), end.stdout + end.stderr
    assert "model" in end.stderr
    assert "Traceback" not in end.stderr


def test_a_hosted_model(typed):
    end = typed[1]["buckeye rl --model gpt-4o-mini --dataset my-org/my-tasks"]
    assert end.returncode == 2
    assert "buckeye eval" in end.stderr


def test_gpus_that_are_not_here(typed):
    end = typed[1]["buckeye rl --config configs/2048.yaml --gpus 4xH100"]
    assert end.returncode == 2
    assert "4xH100" in end.stderr


def test_a_rented_machine_without_a_key(typed):
    end = typed[1]["buckeye rl --gpus 4xH100 --provider prime"]
    assert end.returncode in (1, 2)
    assert "Traceback" not in end.stderr
    assert end.stderr.startswith("error: ")
