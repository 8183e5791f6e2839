"""Resuming a run: its first step, leftover processes of an earlier start, and the command."""

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

_LEFT_SECONDS = 60.0
_POLL_SECONDS = 0.2
_TELL_SECONDS = 10.0
_OF_A_START = ("--clean", "--resume", "--dry-run", "--no-clean", "--no-resume", "--no-dry-run")
"""Flags that choose how a run starts; they may have a value, as in `--clean true`."""


@dataclass(frozen=True, slots=True)
class RunOrigin:
    """The point where a start begins: the checkpoint of `step`, or the original model if None.

    `is_resume` is True if the start continues a run that was started before.
    """

    step: int | None
    is_resume: bool


def find_run_origin(config: RLConfig) -> RunOrigin:
    """Return where the run begins, as the configuration requests.

    A resumed run without any committed checkpoint begins at the original model. Raises CheckpointError if the
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
    """Return the checkpoint from which the run would resume, or None without checkpoints.

    This is the newest one. But if the newest attempt began at another checkpoint and has committed none
    since, it is that one, so a user who went back to an earlier step stays there.
    """
    by_age = checkpoints_oldest_first(output_dir / "checkpoints")
    if not by_age:
        return None
    newest = by_age[-1]
    try:
        attempt = read_json(output_dir / RUN_FILE)["attempts"][-1]
        began = [info for info in by_age if info.step == attempt["resumed_step"]]
        return began[0] if began and attempt["attempt"] > newest.attempt else newest
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return newest


def find_newest_commit(
    output_dir: Path, *, first_attempt: int, verify: bool = False
) -> CheckpointInfo | None:
    """Return the newest checkpoint committed by attempt `first_attempt` or a later one, or None.

    With `verify`, damaged checkpoints are skipped with a warning.
    """
    by_age = reversed(checkpoints_oldest_first(output_dir / "checkpoints"))
    own = takewhile(lambda info: info.attempt >= first_attempt, by_age)
    return first_valid_checkpoint(own, verify_checkpoint) if verify else next(own, None)


def wait_for_leftovers(output_dir: Path) -> None:
    """Wait until no process of an earlier start of this run is left.

    Such processes end with their launcher, which may have been killed a moment ago. One that is suspended or
    does not end in time is killed. Raises RunError if killing fails.
    """
    if not (output_dir / STATUS_FILE).exists():
        return
    try:
        record = read_record(output_dir)
    except UsageError as error:
        log.warning("Not looking for what is left of the run: %s", error)
        return
    if record.elsewhere:
        return
    started = told = time.monotonic()
    while left := processes_left(record):
        titles = ", ".join(f"{each.title} ({each.process.pid})" for each in left)
        now = time.monotonic()
        if now - started > 2 * _LEFT_SECONDS:
            raise RunError(f"Processes of an earlier start of this run cannot be killed: {titles}.")
        for each in left:
            if now - started > _LEFT_SECONDS or _is_suspended(each.process):
                log.warning("Killing %s (%d), which is left of the run", each.title, each.process.pid)
                with suppress(psutil.NoSuchProcess):
                    each.process.kill()
        if told == started or now - told > _TELL_SECONDS:
            log.info("Waiting at most %.0f s for what is left of the run: %s", _LEFT_SECONDS, titles)
            told = now
        time.sleep(_POLL_SECONDS)


def _is_suspended(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() == psutil.STATUS_STOPPED)
    return False


def resume_command(command: Sequence[str]) -> str:
    """Return the command that resumes the run which `command` started, from its newest checkpoint."""
    return shlex.join(make_resume_args(command))


def make_resume_args(words: Sequence[str]) -> list[str]:
    """Return the args of a command, or only its flags, changed so that they resume the run."""
    return [*without_flags(words, (*_OF_A_START, "ckpt.resume-step")), "--resume"]


def without_flags(words: Sequence[str], endings: tuple[str, ...]) -> list[str]:
    """Return the args without flags that end in one of `endings`, however spelled, and their values."""
    kept: list[str] = []
    before = False  # True if the previous arg may have this one as its value
    for word in words:
        value = before and not word.startswith(("--", "@"))
        unwanted = word.startswith("--") and word.replace("_", "-").partition("=")[0].endswith(endings)
        before = unwanted and "=" not in word
        if not (value or unwanted):
            kept.append(word)
    return kept


def strip_command(command: Sequence[str]) -> list[str]:
    """Return the args after `rl` or `buckeye rl`."""
    return list(command[2:] if command[0] == "buckeye" else command[1:])
