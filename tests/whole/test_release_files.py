"""Workflows call only the Makefile, declared platforms are tested, and archives have no unwanted files."""

from __future__ import annotations

import importlib.util
import re
import tomllib

import pytest
from ruamel.yaml import YAML
from tests.places import ROOT

from buckeye.version import __version__

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def load(path):
    return YAML(typ="safe").load(path.read_text("utf-8"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_runs_only_targets_of_the_makefile(path):
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text("utf-8"), re.M))
    workflow = load(path)
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] > 0
        commands = [step["run"] for step in job["steps"] if "run" in step]
        assert commands
        assert [line for line in commands if line.removeprefix("make ") not in targets] == []


def test_declared_python_versions_are_tested_and_platforms_are_those_of_the_workflows():
    declared = {line.rpartition(" :: ")[2] for line in PROJECT["classifiers"] if " :: Python :: " in line}
    jobs = load(ROOT / ".github" / "workflows" / "test.yml")["jobs"]
    assert set(jobs["test"]["strategy"]["matrix"]["python"]) == declared
    systems = [line for line in PROJECT["classifiers"] if line.startswith("Operating System")]
    assert systems == ["Operating System :: POSIX :: Linux"]
    assert {job["runs-on"] for job in jobs.values()} == {"ubuntu-latest"}


def test_release_tool_finds_unwanted_files_and_a_wrong_tag(monkeypatch):
    spec = importlib.util.spec_from_file_location("release_tool", ROOT / "tools" / "release.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    wanted = [
        "buckeye/cli/main.py",
        "buckeye/envs/templates/mcp/tests/test_my_env.py",
        "src/buckeye/kv_cache.py",
    ]
    unwanted = ["tests/command.py", "a/__pycache__/b.pyc", "src/.mypy_cache/x", ".env", "src/b.pyc"]
    assert tool.unwanted([*wanted, *unwanted]) == unwanted

    class Done:
        stdout = f"v{__version__} v9.9.9 note-1"

    monkeypatch.setattr(tool.subprocess, "run", lambda *args, **options: Done)
    assert tool.version_problems(__version__) == [f"the tag v9.9.9 is not v{__version__}"]
