"""`make setup`: two concurrent runs in a checkout, and the state after an interruption."""

import importlib.util
import sys
import threading

import pytest
from tests.places import ROOT
from tests.waiting import HANG


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """Setup tool in an empty checkout; `installed` are the environments that it filled."""
    spec = importlib.util.spec_from_file_location("setup_tool", ROOT / "tools" / "setup.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    tool.installed, tool.made = [], []
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    monkeypatch.setattr(tool, "fingerprint", lambda: "the inputs")
    monkeypatch.setattr(tool, "install_torch", lambda python: True)
    monkeypatch.setattr(sys, "argv", ["setup.py", ".venv"])

    def create(target, **settings):
        tool.made.append(settings)
        (target / "bin").mkdir(parents=True, exist_ok=True)
        for name in ("pyvenv.cfg", "bin/python"):
            (target / name).touch()

    monkeypatch.setattr(tool.venv, "create", create)
    monkeypatch.setattr(tool, "install_locked", lambda python: not tool.installed.append(python))
    return tool


def test_the_second_setup_waits_and_finds_everything_done(tool, tmp_path, capsys):
    codes, second = [], threading.Thread(target=lambda: codes.append(tool.main()))

    def install(python):
        second.start()
        while "waiting" not in capsys.readouterr().out:
            second.join(0.01)
        return not tool.installed.append(python)

    tool.install_locked = install
    codes.append(tool.main())
    second.join(HANG)
    assert codes == [0, 0]
    assert tool.installed == [tmp_path / ".venv/bin/python"]


def test_the_second_setup_continues_when_the_first_fails(tool, tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "install_torch", lambda python: False)
    assert tool.main() == 1
    monkeypatch.setattr(tool, "install_torch", lambda python: True)
    monkeypatch.setattr(tool, "run", lambda *argv, quiet=False: True)
    assert tool.main() == 0
    assert len(tool.made) == len(tool.installed) == 1


@pytest.mark.parametrize(
    ("ensurepip_works", "made"), [(True, []), (False, [{"with_pip": True, "clear": True}])]
)
def test_an_environment_without_pip_gets_it(tool, tmp_path, monkeypatch, ensurepip_works, made):
    tool.venv.create(tmp_path / ".venv")
    tool.made.clear()
    monkeypatch.setattr(tool, "run", lambda *argv, quiet=False: "ensurepip" in argv and ensurepip_works)
    assert tool.main() == 0
    assert tool.made == made
    assert len(tool.installed) == 1
