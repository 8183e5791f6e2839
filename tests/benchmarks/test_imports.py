"""Each program of benchmarks/ can be imported alone, as its documented command does."""

import os
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"

PROGRAMS = sorted({*FOLDER.glob("*.py")} - {FOLDER / "vs_trl_peer.py"})  # which runs in TRL's environment

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_program_can_be_imported_alone(path, monkeypatch):
    text = path.read_text() + (FOLDER / "README.md").read_text()
    as_module = f"-m benchmarks.{path.stem}" in text or "from benchmarks import" in path.read_text()
    for name in _own_modules():
        monkeypatch.delitem(sys.modules, name)
    others = [entry for entry in sys.path if Path(entry or ".").resolve() not in (ROOT, FOLDER)]
    monkeypatch.setattr(sys, "path", [str(ROOT if as_module else FOLDER), *others])
    monkeypatch.setattr(os, "environ", os.environ.copy())
    try:
        import_module(f"benchmarks.{path.stem}" if as_module else path.stem)
    finally:
        for name in _own_modules():
            del sys.modules[name]


def _own_modules():
    """Return the names of the imported modules that are in benchmarks/."""
    return [
        name
        for name, module in sys.modules.items()
        if (file := getattr(module, "__file__", None)) and Path(file).parent == FOLDER
    ]
