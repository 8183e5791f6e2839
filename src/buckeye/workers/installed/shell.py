"""Running a program inside an installed environment."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from buckeye.errors import BuckeyeError, UsageError
from buckeye.workers.installed.record import InstalledEnvironment
from buckeye.workers.installed.venv import Installer, find_uv

_ITS_OWN = re.compile(r"(?:python|pip|easy_install)[\d.-]*")
"""Programs that change or are an interpreter: those of another one never stand in for the environment's."""
_ELSEWHERE = re.compile(
    r"PYTHONHOME|PYTHONPATH|PIP_(?:PYTHON|TARGET|PREFIX|ROOT|USER)|"
    r"UV_(?:PYTHON|SYSTEM_PYTHON|TARGET|PREFIX|PROJECT_ENVIRONMENT)"
)
"""Variables that lead an interpreter or an installer away from the environment it belongs to."""


def variables_of(environment: InstalledEnvironment, base: Mapping[str, str]) -> dict[str, str]:
    """The variables of a process in the environment: its programs come first, nothing of ours gets in."""
    kept = {name: value for name, value in base.items() if not _ELSEWHERE.fullmatch(name)}
    path = os.pathsep.join(filter(None, [str(environment.venv / "bin"), base.get("PATH", os.defpath)]))
    return {**kept, "VIRTUAL_ENV": str(environment.venv), "PATH": path}


def become(environment: InstalledEnvironment, command: Sequence[str], given: Mapping[str, str]) -> NoReturn:
    """Replace this process by `command`, or by a shell where it is empty; it gets the variables `given`, too.

    The environment has a `pip` of its own from then on: the next one on PATH would install into the
    interpreter that it belongs to. Raises UsageError if there is no such program, BuckeyeError if no `pip`
    can be had and the program is not the environment's.
    """
    env = {**variables_of(environment, os.environ), **given}
    words = list(command) or [env.get("SHELL") or "/bin/sh"]
    unable = _without_pip(environment)
    program = shutil.which(words[0], path=env["PATH"])
    own = program is not None and Path(program).parent == environment.venv / "bin"
    if unable is not None and not own:
        raise unable
    if program is None:
        raise UsageError(f"there is no program {words[0]!r} in {environment.id}, nor on PATH.")
    if _ITS_OWN.fullmatch(words[0]) and not own:
        raise UsageError(
            f"{words[0]!r} on PATH is of another interpreter than {environment.id}, which has Python "
            f"{environment.python_version}: write `python` or `pip`, or name the other by its path."
        )
    sys.stdout.flush()
    os.execve(program, words, env)  # noqa: S606  a list of words, without a shell


def _without_pip(environment: InstalledEnvironment) -> BuckeyeError | None:
    """Give the environment its `pip`; why that cannot be, as where it may not be written to. Its own programs
    run without."""
    try:
        Installer(environment.venv, find_uv()).add_pip()
    except BuckeyeError as error:
        return BuckeyeError(
            f"{environment.id} has no `pip` of its own, and that of another interpreter would change that "
            f"one. To give it one failed: {error}"
        )
    return None
