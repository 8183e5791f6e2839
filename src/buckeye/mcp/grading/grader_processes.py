"""Run graders in separate processes: a worker that judges values, and programs of the user.

These processes run in a sandbox without network, and with a time limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from buckeye.base.process import clean_environment, ends_within, signal_group
from buckeye.base.process_guard import GUARD, MARK_VARIABLE, kill_marked
from buckeye.base.threads import finish_in_thread
from buckeye.errors import BuckeyeError
from buckeye.mcp.grading.judge import GraderVerdict
from buckeye.mcp.sandbox.confine_command import build_confine_env, confine_argv, sandbox_support
from buckeye.mcp.sandbox.runtime import SandboxLimits

_LIMITS = SandboxLimits(memory=4 * 2**30, network=False, processes=256, disk=2**30)
_START_SECONDS = 60.0
_JUDGE_SECONDS = 10.0
_MAX_OUTPUT = 2**20
_RUNNER = Path(__file__).with_name("python_runner.py")
_THREADS = ThreadPoolExecutor(2, "buckeye-grading")
_THREAD_STATE = threading.local()
"""Holds the worker process of each thread, as `worker`."""


class GraderError(BuckeyeError):
    """A grader reached no verdict. The message is the reason."""

    code = "BK-GRADER"


# Judge values in a worker process.


async def judge_in_worker(request: Mapping[str, Any], *, library: str | None = None) -> GraderVerdict:
    """Return a worker's verdict on a request in the format of `worker.judge_request`.

    The worker imports the module `library` first, outside the time limit. A request that exceeds the time
    limit scores 0. Raises GraderError.
    """
    line = json.dumps(request).encode() + b"\n"
    return await asyncio.get_running_loop().run_in_executor(_THREADS, _judge, line, library)


def _judge(line: bytes, library: str | None) -> GraderVerdict:
    worker: _Worker | None = getattr(_THREAD_STATE, "worker", None)
    if worker is None or worker.has_ended:
        worker = _THREAD_STATE.worker = _Worker()
    if library is not None and library not in worker.libraries:
        if worker.request(json.dumps({"import": library}).encode() + b"\n", _START_SECONDS) is None:
            raise GraderError(f"cannot import {library} within {_START_SECONDS:g} s")
        worker.libraries.add(library)
    reply = worker.request(line, _JUDGE_SECONDS)
    if reply is None:
        return GraderVerdict(0.0, f"no verdict within {_JUDGE_SECONDS:g} s")
    return _verdict_of(reply)


def _verdict_of(reply: Mapping[str, Any]) -> GraderVerdict:
    if "failed" in reply:
        raise GraderError(str(reply["failed"]))
    return GraderVerdict(reply["score"], reply["explanation"])


class _Worker:
    """Worker process that judges one request at a time."""

    def __init__(self) -> None:
        """Start the process. Raises GraderError if it does not start."""
        argv = (sys.executable, "-I", "-m", "buckeye.mcp.grading.worker")
        self.libraries: set[str] = set()
        self._process = subprocess.Popen(  # noqa: S603  argv as a list, without a shell
            confine_argv(argv, limits=_LIMITS, sandbox_support=sandbox_support(), cwd=Path("/")),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=build_confine_env(clean_environment({})),
            start_new_session=True,
        )
        GUARD.watch(self._process.pid)
        if self.request(b"", _START_SECONDS) is None:
            raise GraderError("the worker process for grading does not start", hint="run `buckeye rl doctor`")

    @property
    def has_ended(self) -> bool:
        """True if the process has exited, so that the thread needs a new worker."""
        return self._process.poll() is not None

    def request(self, line: bytes, seconds: float) -> dict[str, Any] | None:
        """Send a request, and return the reply. After a timeout, kill the process and return None."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        deadline = threading.Timer(seconds, signal_group, [self._process.pid])
        deadline.start()
        reply_line = b""
        with contextlib.suppress(OSError):
            self._process.stdin.write(line)
            self._process.stdin.flush()
            reply_line = self._process.stdout.readline(_MAX_OUTPUT)
        deadline.cancel()
        if not reply_line.endswith(b"\n"):
            self._end()
            return None
        reply: dict[str, Any] = json.loads(reply_line)
        return reply

    def _end(self) -> None:
        signal_group(self._process.pid)
        self._process.wait()
        GUARD.forget(self._process.pid)
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()


# Run programs of the user.


async def run_command(argv: Sequence[str], folder: Path, seconds: float) -> tuple[int | None, str]:
    """Run a program in a folder, and return its exit code (None: timeout) and its output.

    The program has no access to the user's keys and home folder. Raises GraderError if the program cannot
    start.
    """
    with tempfile.TemporaryDirectory(prefix="buckeye-grade-") as home:
        code, output = await _run(argv, folder, Path(home), b"", seconds)
    last = output.strip().rpartition("\n")[2]
    if code in (125, 127) and last.startswith(("confine: ", "cannot run ")):  # not from the program
        raise GraderError(last[-300:])
    return code, output


async def run_function(import_path: str, arguments: Mapping[str, Any], seconds: float) -> GraderVerdict:
    """Return the verdict of the user's function `FILE:FUNCTION`. Raises GraderError."""
    file, _, function = import_path.rpartition(":")
    folder = arguments["workdir"]
    reply = await run_script(_RUNNER, (file, function), arguments, seconds, folder and Path(folder))
    return _verdict_of(reply)


async def run_script(
    script: Path, args: Sequence[str], request: Any, seconds: float, folder: Path | None = None
) -> dict[str, Any]:
    """Run a Python script, and return its reply.

    The script reads `request` as JSON from stdin, and writes its reply as JSON to the file of its last
    argument. Raises GraderError if the script writes no reply in time.
    """
    with tempfile.TemporaryDirectory(prefix="buckeye-grade-") as home:
        reply_file = Path(home, "result.json")
        argv = (sys.executable, "-I", "-B", str(script), *args, str(reply_file))
        text = json.dumps(request, default=str).encode()
        code, output = await _run(argv, folder or Path(home), Path(home), text, seconds)
        if code is None:
            raise GraderError(f"no result within {seconds:g} s")
        try:
            with reply_file.open("rb") as opened:
                reply: dict[str, Any] = json.loads(opened.read(_MAX_OUTPUT))
        except (OSError, ValueError):
            tail = output.strip()[-300:]
            raise GraderError(f"exited with code {code} and without a result: {tail}") from None
    return reply


async def _run(
    argv: Sequence[str], folder: Path, home: Path, input_bytes: bytes, seconds: float
) -> tuple[int | None, str]:
    mark = GUARD.new_mark()
    env = clean_environment({"HOME": str(home), "TMPDIR": str(home), MARK_VARIABLE: mark})
    with tempfile.TemporaryFile() as stdin, (home / "output").open("w+b") as output:
        stdin.write(input_bytes)
        stdin.seek(0)
        process = await asyncio.create_subprocess_exec(
            *confine_argv(argv, limits=_LIMITS, sandbox_support=sandbox_support(), cwd=folder),
            stdin=stdin,
            stdout=output,
            stderr=output,
            env=build_confine_env(env),
            start_new_session=True,
        )
        GUARD.watch(process.pid)
        try:
            in_time = await ends_within(process, seconds)
        finally:
            signal_group(process.pid)
            await ends_within(process, 5.0)
            GUARD.forget(process.pid)
            await finish_in_thread(kill_marked, mark)  # children may have left the process group
        output.seek(0)
        text = output.read(_MAX_OUTPUT).decode("utf-8", "replace")
    return process.returncode if in_time else None, text
