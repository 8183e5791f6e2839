"""Steering a run on another machine from here: by the process that looks after it, or at its terminal."""

from __future__ import annotations

import os
import shlex
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from buckeye.errors import RunError, UsageError
from buckeye.remote.ssh_target import parse_target
from buckeye.run.directory import is_in_use
from buckeye.storage import read_json

REMOTE_FILE = "remote.json"
"""In the run directory: where the run is carried out, as it was last started."""

REMOTE_LOG = "remote.log"
"""Beside it: what the run has printed there."""

_POLL_SECONDS = 0.2
_TELL_SECONDS = 15.0
_SECONDS = 1800.0
_PAUSE_SECONDS = 1.0


def is_remote(output_dir: Path) -> bool:
    """Whether the run here was last carried out elsewhere."""
    return (output_dir / REMOTE_FILE).exists()


def stop_remote(output_dir: Path, *, now: bool, timeout: float | None, tell: Callable[[str], None]) -> bool:
    """Ask the process that looks after a run elsewhere to end it, and wait until it has: with a checkpoint,
    or `now` without waiting for that. Whether there was such a process. Raises RunError after `timeout`
    seconds (by default half an hour)."""
    if not is_in_use(output_dir):
        return False
    pid = int((output_dir / ".lock").read_text().strip())
    os.kill(pid, signal.SIGTERM)
    if now:
        time.sleep(_PAUSE_SECONDS)
        os.kill(pid, signal.SIGTERM)
    patience = timeout if timeout is not None else _SECONDS
    started = told = time.monotonic()
    while is_in_use(output_dir):
        passed = time.monotonic()
        if passed - started > patience:
            raise RunError(f"{output_dir} did not end within {patience:.0f} s; process {pid} looks after it.")
        if passed - told > _TELL_SECONDS:
            tell(f"waiting for the run's last checkpoint to arrive ({passed - started:.0f} s)")
            told = passed
        time.sleep(_POLL_SECONDS)
    return True


def terminal_of(output_dir: Path) -> list[str]:
    """The command of ssh that shows the terminal of a run elsewhere. Raises UsageError for a run that is
    here."""
    try:
        place: dict[str, Any] = read_json(output_dir / REMOTE_FILE)
        target = parse_target(place["target"])
        key = ["-i", place["identity_file"]] if place["identity_file"] else []
        argv = ["ssh", "-t", *key, "-p", str(target.port), "-o", f"UserKnownHostsFile={place['known_hosts']}"]
        return [*argv, f"{target.user}@{target.host}", *shlex.split(place["tmux"])]
    except FileNotFoundError:
        raise UsageError(
            f"{output_dir} is a run on this machine. `buckeye rl logs {output_dir} -f` follows it."
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{output_dir / REMOTE_FILE} cannot be read ({error}).") from None
