"""What docs/init.md and docs/hf.md show works as it stands, and their tables are complete."""

import json
import os
import re
from pathlib import Path

import pytest
from tests.command import run_here
from tests.places import ROOT

from buckeye.config.load import load_config
from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.mcp.environment import load_environment
from buckeye.mcp.tasks.lock import Lock, read_lock

DOCS = ROOT / "docs"
PAGES = {name: (DOCS / f"{name}.md").read_text(encoding="utf-8") for name in ("init", "hf")}


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGES[page], re.S | re.M)


@pytest.mark.parametrize(("page", "command"), [("init", ["rl", "init"]), ("hf", ["hf"])])
def test_every_flag_of_the_page_exists(page, command, tmp_path):
    printed = run_here(*command, "--help", cwd=tmp_path, env=os.environ | {"COLUMNS": "200"}).stdout
    for flag in set(re.findall(r"`(--[a-z-]+|-[a-z])\b", PAGES[page])):
        assert flag in printed, flag


def test_the_dataset_the_environment_and_the_lock_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (lock,) = blocks("hf", "yaml")
    Path("buckeye.lock.yaml").write_text(lock)
    task = {"prompt": "p", "evaluate_tool": {"name": "evaluate"}}
    Path("tasks.json").write_text(json.dumps(task))
    kept = next(line for line in blocks("hf", "bash")[0].splitlines() if "--no-push" in line)
    done = run_here(*kept.partition("#")[0].split()[1:], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert read_lock(Path("buckeye.lock.yaml")).primary_dataset.name == "my-tasks"
    Path("configs").mkdir()
    Path("configs/my-env.yaml").write_text("system_prompt: p\naction_mappings: {done: {_tool: null}}\n")
    Path("orch.toml").write_text(blocks("hf", "toml")[0])
    (env,) = load_config(OrchestratorConfig, ["@", "orch.toml"]).env
    assert [one.id for one in load_environment(**env.args).tasks("train")] == ["task-0001"]


def test_the_keys_of_the_lock_file_are_all_there():
    for key in Lock.model_fields:
        assert f"`{key}`" in PAGES["hf"], key
