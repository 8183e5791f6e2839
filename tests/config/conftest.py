from __future__ import annotations

import pytest

from buckeye.config.load import load_config
from buckeye.config.rl import RLConfig
from buckeye.errors import ConfigError


class Folder:
    """Folder to write files into, which is also the working directory."""

    def __init__(self, path):
        self.path = path

    def write(self, name, text):
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        return name


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Folder(tmp_path)


@pytest.fixture
def load():
    """Return a function that loads a configuration; the arguments may be one text."""

    def load(model, *argv):
        argv = argv[0].split() if len(argv) == 1 else list(argv)
        return load_config(model, argv)

    return load


@pytest.fixture
def load_run(load):
    """Return a function that loads an `rl` configuration.

    It puts bare `--trainer --orchestrator --inference` before the arguments.
    """

    def load_run(*argv):
        argv = argv[0].split() if len(argv) == 1 else list(argv)
        return load(RLConfig, "--trainer", "--orchestrator", "--inference", *argv)

    return load_run


@pytest.fixture
def refused(load):
    """Return a function that returns the code and the text of the ConfigError that loading raises."""

    def refused(model, *argv):
        with pytest.raises(ConfigError) as caught:
            load(model, *argv)
        return f"[{caught.value.code}] {caught.value}"

    return refused
