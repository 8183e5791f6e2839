"""Program of a session, and its Python script if its libraries can be imported in advance."""

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

    `cwd` None means the directory of this process. `confine` is the specification of confine.py, or None
    without a sandbox.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path | None = None
    confine: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PythonScript:
    """A script that is installed next to its interpreter.

    `variables` affect an interpreter or its libraries before any Python code runs.
    """

    interpreter: str
    path: Path
    variables: tuple[tuple[str, str], ...]


def python_script(program: Program) -> PythonScript | None:
    """Return the script that a program runs, or None for other commands."""
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
