"""A project for `buckeye rl`, and the command in this process."""

import json
import sys
import tomllib

import pytest
from tests.setup.recipe.rl_project import fill

from buckeye.cli import main


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Folder with a configuration, tasks and a model, and a separate home directory."""
    folder = tmp_path / "project"
    fill(folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("buckeye.launch.preflight.devices._visible_gpus", tuple)
    monkeypatch.setattr("buckeye.cli.dry_run.run_preflight_checks", lambda *_: [])  # no model, no server
    return folder


@pytest.fixture
def rl(project, monkeypatch, capsys):
    """Return a function that runs the command in this process; it returns (exit code, stdout, stderr)."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["rl", *words])
        with pytest.raises(SystemExit) as ended:
            main.rl()
        out, err = capsys.readouterr()
        return ended.value.code, out, err

    return run


@pytest.fixture
def planned(rl):
    """Return a function that returns the settings in the file that a run would have."""

    def planned(*words):
        code, out, err = rl("--dry-run", "--json", *words)
        assert code == 0, err
        return tomllib.loads(json.loads(out)["text"])

    return planned
