"""Programs and configurations shown on pages run unchanged."""

import inspect
import json
from pathlib import Path

import pytest
import torch
from tests.command import run_here
from tests.mcp.gym import gym_config
from tests.places import ROOT
from tests.whole.docs.blocks import blocks

from buckeye.config.load import load_config
from buckeye.config.losses import CustomLossConfig
from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.config.rewards import CustomAdvantageConfig
from buckeye.config.yaml_source import read_yaml
from buckeye.envs.base import Task
from buckeye.mcp.actions.literals import read_call
from buckeye.mcp.actions.parser import parse_reply
from buckeye.mcp.config import DefaultsConfig, ParserConfig, RubricConfig, load_gym_config
from buckeye.mcp.environment import load_environment
from buckeye.mcp.tasks.lock_file import read_lock
from buckeye.mcp.tasks.task_files import read_tasks
from buckeye.orchestrator.advantages import Scored, batch_advantages, reward_shaping
from buckeye.trainer.losses import LossInputs
from buckeye.trainer.losses.policy_gradient import total_loss

PUBLISH = "docs/how-to/publish-environments.md"


def texts(page, language):
    return [block.text for block in blocks((ROOT / page).read_text("utf-8")) if block.language == language]


def test_the_configuration_of_the_readme_and_the_shown_environments(tmp_path):
    (run,) = texts("README.md", "toml")
    environment = texts("docs/how-to/write-environments.md", "python")[0]
    files = {"run.toml": run, "mcp.toml": texts("docs/reference/mcp-files.md", "toml")[0]}
    for name, text in (files | {"capitals.py": environment}).items():
        (tmp_path / name).write_text(text)
    lines = "".join(texts("README.md", "bash")).splitlines()
    command = next(line for line in lines if line.startswith("rl "))
    words = [*command.split(), "--orchestrator.env.0.id", "capitals.py", "--dry-run", "--json"]
    done = run_here(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert '"rollouts_per_example": 16' in done.stdout
    assert "capitals" not in done.stderr  # it was found, loaded and satisfies the protocol
    (env,) = load_config(OrchestratorConfig, ["@", str(tmp_path / "mcp.toml")]).env
    assert env.args.keys() <= inspect.signature(load_environment).parameters.keys()


def test_the_dataset_the_environment_and_the_lock_file_of_hf(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("buckeye.lock.yaml").write_text(texts(PUBLISH, "yaml")[0])
    task = {"prompt": "p", "evaluate_tool": {"name": "evaluate"}}
    Path("tasks.json").write_text(json.dumps(task))
    kept = next(line for line in texts(PUBLISH, "bash")[0].splitlines() if "--no-push" in line)
    done = run_here(*kept.partition("#")[0].split()[1:], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert read_lock(Path("buckeye.lock.yaml")).primary_dataset.name == "my-tasks"
    Path("configs").mkdir()
    Path("configs/my-env.yaml").write_text("system_prompt: p\naction_mappings: {done: {_tool: null}}\n")
    Path("orch.toml").write_text(texts(PUBLISH, "toml")[0])
    (env,) = load_config(OrchestratorConfig, ["@", "orch.toml"]).env
    assert [one.id for one in load_environment(**env.args).tasks("train")] == ["task-0001"]


@pytest.fixture
def algorithms(tmp_path):
    """File with the functions of the pages on losses and rewards."""
    file = tmp_path / "own.py"
    pages = ("docs/reference/losses.md", "docs/reference/rewards.md")
    file.write_text("\n\n".join(text for page in pages for text in texts(page, "python")))
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


MCP = (ROOT / "docs" / "reference" / "mcp-files.md").read_text("utf-8")


def table(heading):
    """Return the rows of the table with this first line, as two cells without backquotes."""
    lines = MCP.split(f"{heading}\n|---|---|\n")[1].split("\n\n")[0].splitlines()
    rows = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in lines]
    return [(first.strip("`"), second.strip("`")) for first, second in rows]


def test_the_task_and_its_fields(tmp_path):
    path = tmp_path / "tasks.json"
    path.write_text(texts("docs/reference/mcp-files.md", "json")[0])
    (task,) = read_tasks(path)
    assert task.id == "task-001"
    assert [name for name, _ in table("| field | |")] == list(type(task).model_fields)


def test_the_configuration_shows_the_defaults(tmp_path):
    path = tmp_path / "my-env.yaml"
    path.write_text(texts("docs/reference/mcp-files.md", "yaml")[0])
    config = load_gym_config(path)
    assert (config.parser, config.rubric, config.defaults) == (
        ParserConfig(),
        RubricConfig(),
        DefaultsConfig(),
    )
    assert list(config.actions) == ["move", "done"]


@pytest.mark.parametrize("written", [written for written, _ in table("| written | the argument is |")])
def test_every_form_of_the_mapping(tmp_path, written):
    path = tmp_path / "one.yaml"
    path.write_text(f"a:\n  _tool: tool\n  {written}\n")
    assert len(gym_config(read_yaml(path).values).actions["a"].sources) == 1


@pytest.mark.parametrize(("reply", "expected"), table("| reply | is read as |"))
def test_replies(reply, expected):
    parsed = parse_reply(reply, ParserConfig(), ("move", "click", "say", "done"))
    if parsed.calls:
        (call,) = parsed.calls
        wanted = read_call(expected, 0)
        assert (call.name, list(call.args), call.kwargs) == (wanted.name, wanted.args, wanted.kwargs)
    else:
        assert parsed.problems[0].message == expected


@pytest.mark.parametrize(("reply", "expected"), table("| reply | score |"))
def test_scores(reply, expected):
    parsed = parse_reply(reply, ParserConfig(), ("move", "done"))
    assert parsed.format_score == pytest.approx(float(expected))
