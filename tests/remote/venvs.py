"""Virtual environments with third-party programs, made once."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from tests.places import ROOT


def venv_with(name: str, *requirements: str) -> Path:
    """Return the directory `bin` of a virtual environment with these packages."""
    target = ROOT / ".cache" / "venvs" / name
    stamp = target / ".requirements"
    wanted = hashlib.sha256("\n".join([*requirements, sys.version]).encode()).hexdigest()
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.rmtree(target, ignore_errors=True)
        venv.create(target, with_pip=True)
        pip = [target / "bin" / "python", "-m", "pip", "install", "-q", *requirements]
        subprocess.run(pip, check=True)
        stamp.write_text(wanted)
    return target / "bin"
