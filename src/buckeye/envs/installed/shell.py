"""Running a program inside an installed environment."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from buckeye.envs.installed.record import InstalledEnvironment
from buckeye.errors import UsageError


def variables_of(environment: InstalledEnvironment, base: Mapping[str, str]) -> dict[str, str]:
    """The variables of a process in the environment: its programs come first, nothing of ours gets in."""
    kept = {name: value for name, value in base.items() if name not in ("PYTHONHOME", "PYTHONPATH")}
    path = os.pathsep.join(filter(None, [str(environment.venv / "bin"), base.get("PATH", os.defpath)]))
    return {**kept, "VIRTUAL_ENV": str(environment.venv), "PATH": path}


def become(environment: InstalledEnvironment, command: Sequence[str]) -> NoReturn:
    """Replace this process by `command`, or by a shell where it is empty. Raises UsageError if there is no
    such program."""
    env = variables_of(environment, os.environ)
    words = list(command) or [env.get("SHELL") or "/bin/sh"]
    program = shutil.which(words[0], path=env["PATH"])
    if program is None:
        raise UsageError(f"there is no program {words[0]!r} in {environment.id}, nor on PATH.")
    sys.stdout.flush()
    os.execve(program, words, env)
