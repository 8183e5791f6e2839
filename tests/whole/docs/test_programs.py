"""The programs and configurations that pages show run as they stand."""

import inspect
import subprocess
import sys

import pytest
import torch
from tests.command import run_here
from tests.places import ROOT
from tests.whole.docs.blocks import blocks

from buckeye.config.load import load_config
from buckeye.config.losses import CustomLossConfig
from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.config.rewards import CustomAdvantageConfig
from buckeye.envs.base import Task
from buckeye.mcp.environment import load_environment
from buckeye.orchestrator.advantages import Scored, batch_advantages, reward_shaping
from buckeye.trainer.losses import LossInputs, total_loss


def texts(page, language):
    return [block.text for block in blocks((ROOT / page).read_text("utf-8")) if block.language == language]


def test_the_configuration_and_the_environment_of_the_readme(tmp_path):
    train, orch, mcp = texts("README.md", "toml")
    (environment,) = texts("README.md", "python")
    files = {"train.toml": train, "orch.toml": orch, "infer.toml": "", "mcp.toml": mcp}
    for name, text in (files | {"capitals.py": environment}).items():
        (tmp_path / name).write_text(text)
    lines = "".join(texts("README.md", "bash")).splitlines()
    command = next(line for line in lines if line.startswith("rl "))
    words = [*command.split(), "--orchestrator.env.0.id", "capitals.py", "--dry-run"]
    done = run_here(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert '"rollouts_per_example": 16' in done.stdout
    assert "capitals" not in done.stderr  # it was found, loaded and satisfies the protocol
    (env,) = load_config(OrchestratorConfig, ["@", str(tmp_path / "mcp.toml")]).env
    assert env.args.keys() <= inspect.signature(load_environment).parameters.keys()


@pytest.mark.e2e
def test_the_program_of_the_wire(tmp_path):
    (program,) = texts("docs/wire.md", "python")
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.stdout == "The dog. 1\n", ran.stderr


@pytest.fixture
def algorithms(tmp_path):
    """A file with the functions of docs/algorithms.md."""
    file = tmp_path / "own.py"
    file.write_text("\n\n".join(texts("docs/algorithms.md", "python")))
    return file


def scored(reward, *replies, **components):
    task, given = Task(id="t", messages=()), {"replies": replies, "components": components}
    return Scored(reward=reward, turn_rewards=[reward], turn_lengths=[1], task=task, **given)


def test_the_loss(algorithms):
    inputs = LossInputs(
        logprobs=torch.tensor([-1.0]),
        entropies=torch.zeros(1),
        sampler_logprobs=torch.tensor([-1.5]),
        reference_logprobs=None,
        advantages=torch.ones(1),
        sequences=torch.tensor([0]),
        staleness=torch.tensor([0]),
    )
    config = CustomLossConfig(import_path=f"{algorithms}:power", kwargs={"exponent": 2})
    assert total_loss(inputs, config).loss.item() == pytest.approx(-torch.e)


def test_the_advantage(algorithms):
    config = CustomAdvantageConfig(import_path=f"{algorithms}:best_only", kwargs={"scale": 2.0})
    assert batch_advantages([[scored(1.0), scored(0.5)]], config) == [[[2.0], [0.0]]]


def test_the_shaping(algorithms):
    config = OrchestratorConfig(reward_shaping={"function": {"import_path": f"{algorithms}:polite"}})
    rollouts = scored(1.0, "please", "so"), scored(1.0, "please", style=0.6)
    shaping = reward_shaping(config)
    assert [shaping.amounts(rollout)["function"] for rollout in rollouts] == [0.1, 0.0]
