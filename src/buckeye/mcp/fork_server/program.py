"""Command that starts a server process, and the Python script of this command, if it is one."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PYTHON = re.compile(r"python(3(\.\d+)?)?")
_STARTUP_PREFIXES = ("PYTHON", "LD_", "LC_", "LANG", "MALLOC_", "GLIBC_", "OMP_", "OPENBLAS_", "MKL_")


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A command with its complete environment.

    `cwd` None means the working directory of this process. `confine` is the specification for
    `sandbox/confine.py`, or None without a sandbox.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path | None = None
    confine: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PythonScript:
    """Python script in the same folder as its interpreter, such as `.venv/bin/my-server`.

    `variables` are the environment variables that affect an interpreter or a library at its start.
    """

    interpreter: str
    path: Path
    variables: tuple[tuple[str, str], ...]


def python_script(program: Program) -> PythonScript | None:
    """Return the Python script that a program runs, or None if the program is not such a script."""
    path = Path(shutil.which(program.argv[0], path=program.env.get("PATH")) or "/nowhere")
    try:
        with path.open("rb") as file:
            first_line = file.readline(1_000).decode()
    except (OSError, UnicodeDecodeError):
        return None
    python = Path(first_line.removeprefix("#!").strip())
    if not first_line.startswith("#!") or not _PYTHON.fullmatch(python.name) or python.parent != path.parent:
        return None
    variables = tuple(sorted(item for item in program.env.items() if item[0].startswith(_STARTUP_PREFIXES)))
    return PythonScript(interpreter=str(python), path=path, variables=variables)
