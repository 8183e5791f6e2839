"""Stop a remote run, through the local process that supervises it or directly on its machine.

This module also records the state of a remote run for other local processes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from buckeye.base.columns import quoted
from buckeye.errors import RemoteError, RunError, UsageError
from buckeye.launch.progress import human_duration
from buckeye.remote.connection import LostConnectionError, SshConnection, parse_target
from buckeye.remote.follow import Follower
from buckeye.remote.job import open_agent, terminal_argv
from buckeye.run_files.directory import is_in_use, lock_directory
from buckeye.run_files.known_runs import (
    RemoteJob,
    RemoteRun,
    current_record,
    read_remote_run,
    write_remote_run,
)
from buckeye.run_files.record import ACTIVE_STATES
from buckeye.runs.status import newest_step
from buckeye.runs.stop import StopResult, wait_for_end

_SECONDS = 1800.0
_PAUSE_SECONDS = 1.0
_REACH_SECONDS = 20.0


class RemoteRunRecorder:
    """Writer of `remote.json`, where other local processes read the state of a remote run.

    The file also has the last message to the user. A write error is only a warning.
    """

    def __init__(self, output_dir: Path, run_id: str, tell: Callable[[str], None]) -> None:
        now = time.time()
        self._output_dir, self._tell = output_dir, tell
        self._remote_run = RemoteRun(run_id=run_id, state="starting", started=now, said=now)
        self.update()

    def tell(self, text: str) -> None:
        """Show a message to the user, and record its last line."""
        self._tell(text)
        words = text.strip().splitlines()
        self.update(doing=words[-1] if words else "")

    def update(self, **changes: Any) -> None:
        """Change fields of the record, and write it to `remote.json`."""
        self._remote_run = msgspec.structs.replace(self._remote_run, said=time.time(), **changes)
        try:
            write_remote_run(self._output_dir, self._remote_run)
        except OSError as error:
            self._tell(f"warning: cannot record the state of the run: {error}")


def stop_remote(
    output_dir: Path, *, now: bool, timeout: float | None, tell: Callable[[str], None]
) -> StopResult:
    """Stop a remote run. Return when the run has ended and its files are downloaded.

    The request goes to the local process that supervises the run, or to the machine if no local process
    supervises the run. The run writes a checkpoint before it ends. With `now`, it ends without a checkpoint
    and without a download. `tell` gets progress messages. Raises RunError after `timeout` seconds (default:
    half an hour), and RemoteError if the machine does not respond.
    """
    remote_run = read_remote_run(output_dir)
    was_running = is_in_use(output_dir)
    if was_running:
        _stop_by_supervisor(output_dir, now=now, timeout=timeout or _SECONDS, tell=tell)
    elif (
        remote_run is not None
        and remote_run.job is not None
        and current_record(output_dir).state in ACTIVE_STATES
    ):
        was_running = True
        _stop_without_supervisor(output_dir, remote_run.job, now=now, tell=tell)
        over = msgspec.structs.replace(
            remote_run, state="over", said=time.time(), doing="stopped by `rl stop`"
        )
        write_remote_run(output_dir, over)
    state = current_record(output_dir).actual_state()
    return StopResult(state=state, was_running=was_running, checkpoint_step=newest_step(output_dir))


def stop_left_job(output_dir: Path, *, tell: Callable[[str], None]) -> bool:
    """Stop the remote job that a killed command has left. Return True if its files are downloaded."""
    remote_run = read_remote_run(output_dir)
    if remote_run is None or remote_run.state != "running" or is_in_use(output_dir):
        return False
    try:
        return stop_remote(output_dir, now=False, timeout=None, tell=tell).was_running
    except RemoteError as error:
        tell(f"warning: {error}")
        return False


def _stop_by_supervisor(output_dir: Path, *, now: bool, timeout: float, tell: Callable[[str], None]) -> None:
    """Signal the supervising process, and wait until it has ended.

    The first signal requests a checkpoint and the end of the run. With `now`, a second signal ends the
    process immediately.
    """
    try:
        pid = int((lock := output_dir / ".lock").read_text())
    except ValueError:  # just locked, or the disk is full
        hint = f"retry; if the file stays empty, `fuser {quoted(lock)}` shows the process to end"
        message = f"{output_dir} is in use by an unknown process: its `.lock` is empty"
        raise RunError(message, code="BK-RUN-ACTIVE", hint=hint) from None
    remote_run = read_remote_run(output_dir)
    stopping = remote_run is not None and remote_run.stopping
    for number in range(int(now) + int(not stopping)):
        if number:
            time.sleep(_PAUSE_SECONDS)
        if is_in_use(output_dir):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def pending() -> str:
        remote_run = read_remote_run(output_dir)
        doing = f", which reports: {remote_run.doing}" if remote_run is not None else ""
        return f"process {pid}{doing}" if is_in_use(output_dir) else ""

    if left := wait_for_end(pending, timeout, tell):
        raise RunError(
            f"{output_dir} did not end within {human_duration(timeout)}; still running: {left}",
            code="BK-RUN-STALLED",
            hint=f"to end it without a checkpoint: buckeye rl stop {quoted(output_dir)} --now",
        )


def _stop_without_supervisor(
    output_dir: Path, job: RemoteJob, *, now: bool, tell: Callable[[str], None]
) -> None:
    """Stop a run that no local process supervises.

    Send the request to its machine, and download the files of the run.
    """
    tell(f"no process here manages the run: asking {job.target} to stop it")
    with lock_directory(output_dir):
        try:
            asyncio.run(_stop_on_machine(output_dir, job, now=now, tell=tell))
        except LostConnectionError as error:
            hints = (error.hint, _hint_if_gone(output_dir, job))
            raise RemoteError(
                f"nothing was stopped: {error.message}", code=error.code, hint="\n".join(filter(None, hints))
            ) from None
    if job.pod is not None:
        tell(f"its pod may still run and cost money. End it: buckeye rl pods terminate {job.pod}")


async def _stop_on_machine(
    output_dir: Path, job: RemoteJob, *, now: bool, tell: Callable[[str], None]
) -> None:
    link = SshConnection(
        parse_target(job.target),
        known_hosts=Path(job.known_hosts),
        identity_file=Path(job.identity_file) if job.identity_file else None,
        own_settings=job.pod is None,
        tell=tell,
    )
    try:
        await link.connect(timeout=_REACH_SECONDS)
        if now:
            async with open_agent(link, job) as agent:
                await agent.request("stop")
            return
        follower = Follower(link, job, output_dir, screen=sys.stderr, tell=tell)
        follower.stop.set()
        await follower.until_end()
    finally:
        link.close()


def _hint_if_gone(output_dir: Path, job: RemoteJob) -> str:
    pods = f"Check whether {job.pod} still exists: `buckeye rl pods list`. " if job.pod is not None else ""
    return f"{pods}If that machine is gone, resume the run from {output_dir} with --resume and its --provider"


def terminal_command(output_dir: Path) -> list[str]:
    """Return the ssh command that opens the terminal of a remote run.

    Raises UsageError for a local run, or for a remote run whose machine is not ready yet.
    """
    remote_run = read_remote_run(output_dir)
    if remote_run is None:
        raise UsageError(
            f"{output_dir} is a run on this machine",
            code="BK-CLI-ARGUMENT",
            hint=f"follow it with `buckeye rl logs {quoted(output_dir)} -f`",
        )
    job = remote_run.job
    if job is None:
        raise UsageError(
            f"{output_dir} has no terminal yet; it is starting: {remote_run.doing}", code="BK-RUN-NO-DATA"
        )
    try:
        target = parse_target(job.target)
    except ValueError as error:
        raise UsageError(f"{output_dir}: remote.json is not valid: {error}", code="BK-FILE-FORMAT") from None
    return terminal_argv(target, job.identity_file, job.known_hosts, job.id)
