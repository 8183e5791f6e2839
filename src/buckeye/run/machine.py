"""What this machine has: processors, GPUs. Facts only, read without torch."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from buckeye.errors import UsageError
from buckeye.process import usable_cores

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The parts of a machine that a plan depends on. `gpus` are the CUDA device ids that can be used."""

    cores: int
    gpus: tuple[int, ...]


def this_machine() -> Machine:
    """Look at the machine we are on. A container's share of the processors counts, not the host's number."""
    return Machine(cores=usable_cores(), gpus=_visible_gpus())


def _visible_gpus() -> tuple[int, ...]:
    if shutil.which("nvidia-smi") is None:
        if list(Path("/dev").glob("nvidia[0-9]*")):
            log.warning("There is a GPU, but no nvidia-smi in PATH to ask about it: going on without a GPU")
        return ()
    try:
        listing = subprocess.run(
            ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"],  # noqa: S607  a program of the system, found as the user finds it
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("nvidia-smi is installed but failed (%s): going on without a GPU", error)
        return ()
    found = tuple(int(line) for line in listing.split() if line.isdigit())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return found
    parts = [part.strip() for part in visible.split(",") if part.strip()]
    if not all(part.lstrip("-").isdigit() for part in parts):
        raise UsageError(
            f"CUDA_VISIBLE_DEVICES={visible} names GPUs by their UUIDs; name them by number, as in 0,1"
        )
    allowed = {int(part) for part in parts}
    return tuple(gpu for gpu in found if gpu in allowed)
