"""Record of an installed environment: `environment.json` in its folder."""

from __future__ import annotations

import itertools
import os
from datetime import datetime
from pathlib import Path
from typing import Literal

import msgspec

from buckeye.base.keys import home_folder
from buckeye.errors import BuckeyeError

Generation = Literal[
    "verifiers-v0",
    "verifiers-v1",
    "reasoning-gym",
    "textarena",
    "gymnasium",
    "skyrl-gym",
    "inspect-ai",
    "openenv",
    "bfcl-eval",
    "ors-sdk",
    "openreward",
    "hud",
    "buckeye",
]
"""Kind of an installed environment, which `detect_interface` has found."""

ENVIRONMENTS_VARIABLE = "BUCKEYE_ENVIRONMENTS"
RECORD = "environment.json"
LOCK = "requirements.lock"
VENV = "venv"
_MAX_FILES = 1000


class InstalledEnvironment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Installed environment with its own interpreter.

    `name` is the name of the distribution. `id` is the id to write into configurations. `module` is the
    module that has `load_environment` or the taskset. `source` is the name or path that the user gave to
    `buckeye env install`. `index` is the package index, if it is not the default. `requirements` are the
    exact versions of all installed packages. Times are UTC.
    """

    name: str
    id: str
    version: str
    generation: Generation
    module: str
    source: str
    extras: list[str]
    index: str | None
    python: Path
    python_version: str
    constraints: list[str]
    requirements: list[str]
    installed_at: datetime

    @property
    def folder(self) -> Path:
        """Folder of the environment."""
        return self.python.parents[2]

    @property
    def venv(self) -> Path:
        """Virtual environment."""
        return self.folder / VENV

    @property
    def lock(self) -> Path:
        """Lock file with the exact versions."""
        return self.folder / LOCK

    def edited_file(self) -> Path | None:
        """Return a file of the local project that was edited after the installation, or None."""
        project, installed = Path(self.source), self.installed_at.timestamp()
        if not project.is_absolute() or not project.is_dir():
            return None
        files = itertools.islice(project.rglob("*.py"), _MAX_FILES)
        return next((path for path in files if path.exists() and path.stat().st_mtime > installed), None)


def environments_home() -> Path:
    """Return the folder of all installed environments, which may not exist.

    BUCKEYE_ENVIRONMENTS overrides `~/.buckeye/environments`.
    """
    named = os.environ.get(ENVIRONMENTS_VARIABLE)
    if named:
        return Path(os.path.expanduser(named)).absolute()
    return home_folder().absolute() / "environments"


def to_json(environment: InstalledEnvironment) -> bytes:
    """Return the content of `environment.json`."""
    return msgspec.json.format(msgspec.json.encode(environment, enc_hook=str), indent=2) + b"\n"


def read_record(folder: Path) -> InstalledEnvironment | None:
    """Return the record in a folder, or None if it does not exist. Raises BuckeyeError if it is damaged."""
    path = folder / RECORD
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise BuckeyeError(
            f"cannot read {path}: {error.strerror or error}", code="BK-FILE-UNREADABLE"
        ) from None
    try:
        return msgspec.json.decode(data, type=InstalledEnvironment, dec_hook=lambda kind, value: kind(value))
    except (msgspec.DecodeError, UnicodeDecodeError, TypeError, ValueError, RecursionError) as error:
        raise BuckeyeError(
            f"{path} is not a valid record of an environment: {error}",
            code="BK-FILE-FORMAT",
            hint=f"reinstall the environment: buckeye env install {folder.name} --force",
        ) from None
