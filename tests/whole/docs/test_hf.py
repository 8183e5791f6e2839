"""The dataset, the environment and the lock file of docs/hf.md, as it shows them."""

import json
from pathlib import Path

from tests.command import run_here
from tests.places import ROOT
from tests.whole.docs.blocks import blocks

from buckeye.config.load import load_config
from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.mcp.environment import load_environment
from buckeye.mcp.tasks.lock import read_lock


def test_the_dataset_the_environment_and_the_lock_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = {}
    for block in blocks((ROOT / "docs" / "hf.md").read_text("utf-8")):
        texts.setdefault(block.language, block.text)
    Path("buckeye.lock.yaml").write_text(texts["yaml"])
    task = {"prompt": "p", "evaluate_tool": {"name": "evaluate"}}
    Path("tasks.json").write_text(json.dumps(task))
    kept = next(line for line in texts["bash"].splitlines() if "--no-push" in line)
    done = run_here(*kept.partition("#")[0].split()[1:], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert read_lock(Path("buckeye.lock.yaml")).primary_dataset.name == "my-tasks"
    Path("configs").mkdir()
    Path("configs/my-env.yaml").write_text("system_prompt: p\naction_mappings: {done: {_tool: null}}\n")
    Path("orch.toml").write_text(texts["toml"])
    (env,) = load_config(OrchestratorConfig, ["@", "orch.toml"]).env
    assert [one.id for one in load_environment(**env.args).tasks("train")] == ["task-0001"]
