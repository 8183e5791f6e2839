"""Resume a run: find its checkpoint, wait for processes of an earlier start, and make the resume command."""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from buckeye.base.storage import read_json
from buckeye.config.rl import RLConfig
from buckeye.envs.registry import CALLER
from buckeye.errors import RunError, UsageError
from buckeye.launch.resume_checks import check_resumable
from buckeye.run_files.directory import RUN_FILE
from buckeye.run_files.record import STATUS_FILE, processes_left, read_record
from buckeye.transport.checkpoint import (
    CheckpointInfo,
    checkpoints_oldest_first,
    find_usable_checkpoint,
    first_valid_checkpoint,
    list_checkpoints,
    verify_checkpoint,
)

log = logging.getLogger(__name__)

_EXIT_SECONDS = 60.0
_POLL_SECONDS = 0.2
_LOG_SECONDS = 10.0
_START_FLAGS = ("--clean", "--resume", "--dry-run", "--no-clean", "--no-resume", "--no-dry-run")
"""Flags that choose how a run starts. They may have a value, as in `--clean true`."""


@dataclass(frozen=True, slots=True)
class RunOrigin:
    """The point where a run starts: the checkpoint of `step`, or the original model if `step` is None.

    `is_resume` is True if the run was started before and is now resumed.
    """

    step: int | None
    is_resume: bool


def find_run_origin(config: RLConfig) -> RunOrigin:
    """Return the point where the run starts, from `ckpt.resume_step` and the checkpoints of the run.

    A resumed run without a complete checkpoint starts at the original model. Raises CheckpointError if the
    requested checkpoint is missing or damaged, and UsageError if it does not match the configuration.
    """
    ckpt = config.trainer.ckpt
    if ckpt is None or ckpt.resume_step is None:
        return RunOrigin(None, is_resume=False)
    root = config.output_dir / "checkpoints"
    started = (config.output_dir / RUN_FILE).exists()
    if ckpt.resume_step == -1 and started and not list_checkpoints(root):
        return RunOrigin(None, is_resume=True)
    preferred = find_resume_checkpoint(config.output_dir)
    info = find_usable_checkpoint(root, ckpt.resume_step, verify_checkpoint, preferred=preferred)
    check_resumable(config.trainer, info)
    return RunOrigin(info.step, is_resume=True)


def find_resume_checkpoint(output_dir: Path) -> CheckpointInfo | None:
    """Return the checkpoint that `--resume` loads, or None without checkpoints.

    This is the newest checkpoint, with one exception. If the newest attempt resumed from an earlier step and
    has not written a checkpoint yet, it is the checkpoint of that step.
    """
    by_age = checkpoints_oldest_first(output_dir / "checkpoints")
    if not by_age:
        return None
    newest = by_age[-1]
    try:
        attempt = read_json(output_dir / RUN_FILE)["attempts"][-1]
        origins = [info for info in by_age if info.step == attempt["resumed_step"]]
        return origins[0] if origins and attempt["attempt"] > newest.attempt else newest
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return newest


def find_newest_commit(
    output_dir: Path, *, first_attempt: int, verify: bool = False
) -> CheckpointInfo | None:
    """Return the newest checkpoint of attempt `first_attempt` or later, or None.

    With `verify`, damaged checkpoints are skipped with a warning.
    """
    by_age = reversed(checkpoints_oldest_first(output_dir / "checkpoints"))
    own = takewhile(lambda info: info.attempt >= first_attempt, by_age)
    return first_valid_checkpoint(own, verify_checkpoint) if verify else next(own, None)


def wait_for_leftovers(output_dir: Path) -> None:
    """Wait until all processes of an earlier start of this run have ended.

    The processes usually end soon after their launcher. Suspended processes, and processes that do not end
    within 60 s, are killed. Raises RunError if a process cannot be killed.
    """
    if not (output_dir / STATUS_FILE).exists():
        return
    try:
        record = read_record(output_dir)
    except UsageError as error:
        log.warning("Cannot check for leftover processes of the run: %s", error)
        return
    if record.elsewhere:
        return
    started = logged = time.monotonic()
    while leftovers := processes_left(record):
        titles = ", ".join(f"{leftover.title} ({leftover.process.pid})" for leftover in leftovers)
        now = time.monotonic()
        if now - started > 2 * _EXIT_SECONDS:
            raise RunError(
                f"cannot kill processes of an earlier start of this run: {titles}",
                code="BK-RUN-ACTIVE",
                hint="end these processes, or choose another `--output-dir`",
            )
        for leftover in leftovers:
            if now - started > _EXIT_SECONDS or _is_suspended(leftover.process):
                log.warning(
                    "Killing %s (%d), a leftover process of the run", leftover.title, leftover.process.pid
                )
                with suppress(psutil.NoSuchProcess):
                    leftover.process.kill()
        if logged == started or now - logged > _LOG_SECONDS:
            log.info("Waiting at most %.0f s for leftover processes of the run: %s", _EXIT_SECONDS, titles)
            logged = now
        time.sleep(_POLL_SECONDS)


def _is_suspended(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() == psutil.STATUS_STOPPED)
    return False


def resume_command(command: Sequence[str]) -> str:
    """Return the command that resumes the run of `command` from its newest checkpoint."""
    return shlex.join(make_resume_args(command))


def resume_hint(config: RLConfig, command: Sequence[str]) -> str:
    """Return how to resume the run of `command`, for messages.

    This is a command, or a line of Python if the run trains on a Python object.
    """
    if all(env.id != CALLER for env in config.orchestrator.env):
        return resume_command(command)
    return f"buckeye.open_run({str(config.output_dir)!r}).resume(reward=..., or env=...) in Python"


def make_resume_args(args: Sequence[str]) -> list[str]:
    """Return the args to resume the run that `args` started.

    `args` may be a whole command, or only its flags.
    """
    return [*without_flags(args, (*_START_FLAGS, "ckpt.resume-step")), "--resume"]


def without_flags(args: Sequence[str], endings: tuple[str, ...]) -> list[str]:
    """Return the args without the flags that end in one of `endings`, and without the values of these flags.

    In flags, `_` counts as `-`.
    """
    kept: list[str] = []
    takes_value = False  # True if the current arg may be the value of the previous one
    for arg in args:
        is_value = takes_value and not arg.startswith(("--", "@"))
        is_unwanted = arg.startswith("--") and arg.replace("_", "-").partition("=")[0].endswith(endings)
        takes_value = is_unwanted and "=" not in arg
        if not (is_value or is_unwanted):
            kept.append(arg)
    return kept


def strip_command(command: Sequence[str]) -> list[str]:
    """Return the args after `rl` or `buckeye rl`."""
    return list(command[2:] if command[0] == "buckeye" else command[1:])
