"""`buckeye hf`, called in an empty folder, and a hub that is none."""

import json
from pathlib import Path

import pytest
from buckeye.cli.app import app
from tests.run.fake_hub import FakeHub
from typer.testing import CliRunner

from buckeye.errors import BuckeyeError


@pytest.fixture
def hf(tmp_path, monkeypatch):
    """Run the command in an empty folder; its output. Raises what it raises."""
    monkeypatch.chdir(tmp_path)
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)

    def run(*words, tasks=None):
        if tasks is not None:
            Path("tasks.json").write_text(tasks if isinstance(tasks, str) else json.dumps(tasks))
        done = CliRunner().invoke(app, ["hf", *words], catch_exceptions=True)
        if isinstance(done.exception, BuckeyeError):
            raise done.exception
        assert done.exit_code == 0, done.output
        return done.output

    return run


@pytest.fixture
def hub(monkeypatch):
    """A hub that is asked instead of the real one."""
    import huggingface_hub.constants as constants

    with FakeHub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setenv("HF_TOKEN", "hf_planted_token_0123456789")
        yield hub
