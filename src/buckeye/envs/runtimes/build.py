"""Building the image of a folder with a Dockerfile."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from buckeye.envs.runtimes.base import PrepareError, RuntimeUnavailable
from buckeye.errors import UsageError
from buckeye.process import run_program

_BUILD_SECONDS = 3600.0
_BUILDERS = ("docker", "podman")


def build_image(folder: Path, image: str) -> None:
    """Build the image, called `name:tag`, with docker or podman.

    Raises UsageError without a Dockerfile, RuntimeUnavailable without a builder, PrepareError with the last
    words of a build that failed.
    """
    if not (folder / "Dockerfile").is_file():
        raise UsageError(f"--build: {folder} has no Dockerfile")
    program = next((found for one in _BUILDERS if (found := shutil.which(one))), None)
    if program is None:
        raise RuntimeUnavailable(f"--build needs {' or '.join(_BUILDERS)}, and neither is installed.")
    argv = [program, "build", "--tag", image, str(folder)]
    try:
        ran = run_program(argv, seconds=_BUILD_SECONDS)
    except subprocess.TimeoutExpired:
        raise PrepareError(f"{folder} was not built within {_BUILD_SECONDS:g} s.") from None
    if ran.returncode != 0:
        words = "\n".join((ran.stderr or ran.stdout).strip().splitlines()[-12:])
        raise PrepareError(f"{folder} cannot be built into an image:\n{words}")
