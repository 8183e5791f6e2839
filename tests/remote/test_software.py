"""Software that a run needs on a remote machine, computed from its configuration."""

import json
from importlib import metadata

import pytest
from packaging.requirements import Requirement

from buckeye.base.distribution import requirements
from buckeye.config.load import load_config
from buckeye.config.rl import RLConfig
from buckeye.launch.preflight.software_checks import extras_of
from buckeye.mcp.tasks.dataset import write_dataset
from buckeye.mcp.tasks.task_files import read_tasks
from buckeye.remote.bootstrap import setup_steps
from buckeye.remote.software import code_files
from tests.setup.recipe.rl_project import fill, task

MATH = {"name": "right", "reply": {"math": "1/2"}}
BASE = {"mcp", "model"}


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fill(tmp_path)
    write_dataset(tmp_path / "folder", "tasks", {"train": read_tasks(tmp_path / "tasks.json")})
    graded = {**task(0), "grade": MATH}
    del graded["evaluate_tool"]
    (tmp_path / "math.json").write_text(json.dumps([graded]))

    def made(taskset, *words):
        args = json.dumps({"dataset": taskset, "config_path": "configs/my-env.yaml"})
        environment = ("--orchestrator.env.0.id", "mcp", "--orchestrator.env.0.args", args)
        return load_config(RLConfig, ["--trainer", "--orchestrator", *environment, *words])

    return made


@pytest.mark.parametrize(
    ("taskset", "words", "extras"),
    [
        ("tasks.json", (), set()),
        ("folder", (), {"hub"}),
        ("someone/tasks", (), {"hub"}),
        ("math.json", (), {"math"}),
        ("tasks.json", ("--wandb.project", "p"), {"wandb"}),
        ("folder", ("--trackio.project", "p", "--tensorboard", "{}"), {"hub", "tensorboard", "trackio"}),
        ("tasks.json", ("--trainer.optim.type", "adamw8bit"), {"optim8bit"}),
        ("tasks.json", ("--ckpt.store", "s3://bucket/run"), {"s3"}),
        ("tasks.json", ("--ckpt.store", "gs://bucket/run"), {"gs"}),
    ],
)
def test_a_run_needs_the_extras_of_what_it_uses(config, taskset, words, extras):
    found = extras_of(config(taskset, *words))
    assert set(found) == BASE | extras
    (install,) = (step.script for step in setup_steps(extras=found) if step.title == "packages")
    for line in requirements(found):
        assert Requirement(line).name in install


def test_a_machine_knows_what_each_extra_needs(tmp_path):
    for name, content in code_files().items():
        if ".dist-info/" in name:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_bytes(content)
    (there,) = metadata.distributions(path=[str(tmp_path)])
    here = metadata.distribution("buckeye-rl")
    assert there.requires == here.requires
    assert there.metadata.get_all("Provides-Extra") == here.metadata.get_all("Provides-Extra")
