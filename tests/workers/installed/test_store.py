"""List of installed environments, some with damaged records."""

import json
import os
from datetime import datetime

import pytest
from tests.command import run_here

from buckeye.errors import EnvironmentNotFoundError
from buckeye.workers.installed import get_installed


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Installed environments: one complete, one with a truncated record, and a folder that is not one."""
    monkeypatch.setenv("BUCKEYE_HOME", str(tmp_path))
    folder = tmp_path / "environments"
    for name in ("sums", "torn", "mine"):
        (folder / name).mkdir(parents=True)
    record = {
        "name": "sums",
        "id": "maker/sums",
        "version": "1.0",
        "generation": "buckeye",
        "module": "sums",
        "source": "maker/sums",
        "extras": [],
        "index": None,
        "python": folder / "sums" / "venv" / "bin" / "python",
        "python_version": "3.11.7",
        "constraints": [],
        "requirements": ["sums==1.0"],
        "installed_at": "2026-01-02T03:04:05Z",
    }
    text = json.dumps(record, default=str)
    (folder / "sums" / "environment.json").write_text(text)
    (folder / "torn" / "environment.json").write_text(text[:-40])
    return tmp_path


def listed(home, *words):
    done = run_here("env", "list", *words, cwd=home, env={**os.environ, "COLUMNS": "120"})
    assert done.returncode == 0, done.stderr
    return done


def test_a_damaged_record_does_not_hide_the_others(home, wording):
    done = listed(home)
    rows = [line.split() for line in done.stdout.splitlines()[1:]]
    assert rows[0][:3] == ["maker/sums", "1.0", "buckeye"]
    assert rows[1][:3] == ["torn", "-", "damaged"]
    assert len(rows) == 2
    whole, damaged = json.loads(listed(home, "--json").stdout)
    assert (whole["name"], whole["version"], damaged["name"]) == ("sums", "1.0", "torn")
    assert "--force" in damaged["damaged"]
    assert done.stderr == wording


def test_unknown_name_error_lists_installed_environments(home, refusal):
    with refusal(EnvironmentNotFoundError):
        get_installed("other")


def test_name_with_a_typo_gets_only_the_correction(home):
    with pytest.raises(EnvironmentNotFoundError) as missing:
        get_installed("sum")
    assert missing.value.hint == "did you mean `maker/sums`?"
    with pytest.raises(EnvironmentNotFoundError) as missing:
        get_installed("other/sums")
    assert "buckeye env install other/sums" in missing.value.hint


@pytest.mark.parametrize(
    ("edited", "is_stale"), [("2026-01-02T03:04:04Z", False), ("2026-01-02T03:04:06Z", True)]
)
def test_local_project_edited_after_its_installation_is_noticed(home, edited, is_stale):
    project = home / "project"
    project.mkdir()
    code = project / "sums.py"
    code.write_text("")
    os.utime(code, (0, datetime.fromisoformat(edited).timestamp()))
    (project / ".#other.py").symlink_to("me@here.1234")  # a lock of Emacs
    record = home / "environments" / "sums" / "environment.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "source": str(project)}))
    assert get_installed("sums").edited_file() == (code if is_stale else None)
