"""`buckeye hf`, run in an empty directory, and a fake hub."""

import json
from pathlib import Path

import pytest
from tests.run.fake_hub import FakeHub

from buckeye.cli import typer_commands


@pytest.fixture
def hf(tmp_path, monkeypatch, capsys):
    """Return a function that runs the command in an empty directory; it returns the output or raises."""
    monkeypatch.chdir(tmp_path)
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)

    def run(*words, tasks=None):
        if tasks is not None:
            Path("tasks.json").write_text(tasks if isinstance(tasks, str) else json.dumps(tasks))
        capsys.readouterr()
        code = typer_commands.run("hf", words, "buckeye hf")
        printed = capsys.readouterr()
        output = printed.out + printed.err
        assert code == 0, output
        return output

    return run


@pytest.fixture
def hub(monkeypatch):
    """Fake hub that receives all requests to the Hugging Face hub."""
    import huggingface_hub.constants as constants

    with FakeHub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setenv("HF_TOKEN", "hf_planted_token_0123456789")
        yield hub
