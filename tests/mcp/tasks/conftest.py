"""`buckeye hf`, called in an empty folder, and a hub that is none."""

import json
from pathlib import Path

import pytest
from tests.run.fake_hub import FakeHub

from buckeye.cli import typed


@pytest.fixture
def hf(tmp_path, monkeypatch, capsys):
    """Run the command in an empty folder; its output. Raises what it raises."""
    monkeypatch.chdir(tmp_path)
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)

    def run(*words, tasks=None):
        if tasks is not None:
            Path("tasks.json").write_text(tasks if isinstance(tasks, str) else json.dumps(tasks))
        capsys.readouterr()
        code = typed.run("hf", words, "buckeye hf")
        printed = capsys.readouterr()
        output = printed.out + printed.err
        assert code == 0, output
        return output

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
