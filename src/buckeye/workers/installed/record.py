"""What is known of an installed environment: `environment.json` in its folder."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import Literal

import msgspec

from buckeye.errors import BuckeyeError

Generation = Literal["verifiers-v0", "verifiers-v1", "reasoning-gym", "textarena", "buckeye"]
"""Which interface an installed environment has."""

HOME_VARIABLE = "BUCKEYE_HOME"
ENVIRONMENTS_VARIABLE = "BUCKEYE_ENVIRONMENTS"
RECORD = "environment.json"
LOCK = "requirements.lock"
VENV = "venv"


class InstalledEnvironment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An environment in an interpreter of its own.

    `name` is the distribution's, `id` what a configuration calls it, `module` what `load_environment` or the
    taskset is imported from. `source` is what was asked for, `index` where it came from if not the default.
    `requirements` are the exact versions of everything that is installed with it. Times are UTC.
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
        """Where it lies."""
        return self.python.parents[2]

    @property
    def venv(self) -> Path:
        """Its virtual environment."""
        return self.folder / VENV

    @property
    def lock(self) -> Path:
        """Its exact versions, as a requirements file."""
        return self.folder / LOCK


def environments_home() -> Path:
    """The folder that holds all installed environments; it may not exist. BUCKEYE_ENVIRONMENTS names another
    than `~/.buckeye/environments`."""
    named = os.environ.get(ENVIRONMENTS_VARIABLE)
    if named:
        return Path(named).expanduser().absolute()
    home = os.environ.get(HOME_VARIABLE) or "~/.buckeye"
    return Path(home).expanduser().absolute() / "environments"


def to_json(environment: InstalledEnvironment) -> bytes:
    """The content of `environment.json`."""
    return msgspec.json.format(msgspec.json.encode(environment, enc_hook=str), indent=2) + b"\n"


def read_record(folder: Path) -> InstalledEnvironment | None:
    """The environment in a folder, None if there is none. Raises BuckeyeError for a damaged record."""
    path = folder / RECORD
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise BuckeyeError(f"{path} cannot be read: {error.strerror or error}") from None
    try:
        return msgspec.json.decode(data, type=InstalledEnvironment, dec_hook=lambda kind, value: kind(value))
    except (msgspec.DecodeError, UnicodeDecodeError, TypeError, ValueError, RecursionError) as error:
        raise BuckeyeError(
            f"{path} does not describe an environment: {error}. "
            f"Install it again: buckeye env install {folder.name} --force"
        ) from None
