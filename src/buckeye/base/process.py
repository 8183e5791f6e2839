"""Basic functions of every process of Buckeye: child processes, threads, stop signals, end with the parent.

This module also protects keys in the environment of a process from other processes of the user.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Protocol

from buckeye.base.process_guard import GUARD


def _imports_working_directory() -> bool:
    if sys.flags.safe_path or not sys.path:
        return False
    try:
        return sys.path[0] in ("", os.getcwd())
    except OSError:  # the working directory was deleted
        return False


EXIT_INTERRUPTED = 130
"""Exit code of a command that SIGTERM, SIGINT or SIGHUP ended before its work was done."""
STORE_VARIABLE = "BUCKEYE_STORE"
"""Environment variable with the name of the rendezvous file of the trainer ranks on one host."""
PYTHON = (sys.executable,) if _imports_working_directory() else (sys.executable, "-P")
"""Program and flags of a Python process of Buckeye.

The process imports modules of the working directory only if this process does. Otherwise a file of the user
such as `secrets.py` would replace a module of Python.
"""
PROGRESS_BAR_SWITCHES = ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS")
"""Environment variables that switch off the progress bars of huggingface_hub, transformers and datasets."""

_INHERITED_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ")
_CERTIFICATE_VARIABLES = (
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "NODE_EXTRA_CA_CERTS",
)
_DEFAULT_OPEN_FILES = 65_536  # limit of open files if the system has no maximum
_SECRET_NAME = re.compile(
    r"(.*_)?(API)?(KEY|KEYS|TOKEN|TOKENS|SECRET|SECRETS|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|PAT)(_.*)?",
    re.I,
)
_SECRETS_VARIABLE = "BUCKEYE_SECRETS_FD"
_ENV_START, _ENV_END = 47, 48  # field indices after the name in /proc/PID/stat, see proc_pid_stat(5)
_PR_SET_DUMPABLE = 4
_MIN_SECRET_LENGTH = 6
_MAX_SECRETS_BYTES = 60_000  # a pipe holds this much without a reader


@dataclass(frozen=True, kw_only=True, slots=True)
class RunIdentity:
    """Id of a run and number of its attempt.

    Files have both, so that a resumed run does not use files of an earlier attempt.
    """

    run_id: str
    attempt: int


def run_identity() -> RunIdentity:
    """Return the identity that the launcher has set, or a default for a process without a launcher."""
    return RunIdentity(
        run_id=os.environ.get("BUCKEYE_RUN_ID", "local"), attempt=int(os.environ.get("BUCKEYE_ATTEMPT", "1"))
    )


def cpu_threads() -> int:
    """Return the number of compute threads on a CPU: BUCKEYE_THREADS from the launcher, or all cores."""
    return int(os.environ.get("BUCKEYE_THREADS", "0")) or usable_cores()


def usable_cores() -> int:
    """Return the number of cores that this process may use.

    It depends on the CPU affinity and on the quota of the container (cgroup v2 `cpu.max`).
    """
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no cgroup v2, or no quota ("max")
        return cores


def idle_spins(*, cores_to_itself: bool) -> str:
    """Return the number of spins of an idle OpenMP thread before it sleeps (GOMP_SPINCOUNT).

    A value that the user has set is returned unchanged.

    A small model starts the next operation within microseconds, and waking a thread takes longer. If no other
    program uses the cores, 5,000 spins make the computation 1.1 to 1.7 times as fast. If another program uses
    them too, 5,000 spins make the computation up to 1.9 times as slow, so the function returns 1,000. The
    default of OpenMP, hundreds of thousands of spins, makes it ten times as slow.
    """
    return os.environ.get("GOMP_SPINCOUNT", "5000" if cores_to_itself else "1000")


def raise_open_files_limit() -> None:
    """Raise the limit of open files for this process and its children to the maximum of the user.

    Every running rollout has open files and connections, and the default limit is only 256 or 1024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = hard if hard != resource.RLIM_INFINITY else _DEFAULT_OPEN_FILES
    if soft == resource.RLIM_INFINITY or soft >= limit:
        return
    with suppress(ValueError, OSError):  # the effective limit may be lower than the reported one
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def run_program(
    argv: Sequence[str], *, seconds: float, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program until it ends, with empty stdin, and return its exit code and output.

    Raise `OSError` if the program cannot start, and `subprocess.TimeoutExpired` after `seconds`.
    """
    return subprocess.run(  # noqa: S603, an argument list without a shell
        argv,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=seconds,
        env=env,
        cwd=cwd,
        check=False,
    )


class ChildProcess:
    """Program in a separate session. When the program ends, all processes in its session are killed.

    By default, stdout and stderr are those of this process. With `guarded`, the session is also killed when
    this process ends, even by SIGKILL. Raise `OSError` if the program cannot start.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdout: IO[bytes] | int | None = None,
        stderr: IO[bytes] | int | None = None,
        cwd: Path | None = None,
        pass_fds: Sequence[int] = (),
        guarded: bool = False,
    ) -> None:
        self._process = subprocess.Popen(  # noqa: S603, an argument list without a shell
            argv,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=env,
            cwd=cwd,
            pass_fds=pass_fds,
            start_new_session=True,
        )
        self.pid = self._process.pid
        self._guarded = guarded
        if guarded:
            GUARD.watch(self.pid)

    @property
    def returncode(self) -> int | None:
        """Exit code, or None while the program runs.

        When this property first notices the end, it kills the other processes of the session. It does this at
        once, because the system may later give the id of the session to other processes.
        """
        if self._process.returncode is None and self._process.poll() is not None:
            self._finish()
        return self._process.returncode

    def signal(self, number: int, *, session: bool) -> None:
        """Send a signal to the program, or to its whole session, unless the program has ended."""
        if self.returncode is None:
            (self._kill if session else self._process.send_signal)(number)

    def wait(self, seconds: float | None = None) -> int:
        """Wait until the program ends, and return its exit code.

        Raise `subprocess.TimeoutExpired` after `seconds`.
        """
        if self._process.returncode is None:
            self._process.wait(seconds)
            self._finish()
        return self._process.returncode

    def end(self, seconds: float, *, session: bool) -> bool:
        """Send SIGTERM to the program, or to its whole session. Kill the session after `seconds`.

        Return True if the program ended in time.
        """
        self.signal(signal.SIGTERM, session=session)
        try:
            self.wait(seconds)
        except subprocess.TimeoutExpired:
            self._kill(signal.SIGKILL)
            self.wait()
            return False
        return True

    def _finish(self) -> None:
        self._kill(signal.SIGKILL)
        if self._guarded:
            GUARD.forget(self.pid)

    def _kill(self, number: int) -> None:
        signal_group(self.pid, number)


def signal_group(group: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to a process group, unless it has ended."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


class AsyncChild(Protocol):
    """Child process of asyncio."""

    @property
    def returncode(self) -> int | None:
        """Exit code, or None while it runs."""


async def ends_within(process: AsyncChild, seconds: float) -> bool:
    """Return True if a child process ends within `seconds`.

    Unlike `process.wait()`, this function does not wait until the pipes of the process close. A grandchild
    may keep them open.
    """
    import asyncio

    pause, waited = 0.002, 0.0
    while process.returncode is None:
        if waited >= seconds:
            return False
        await asyncio.sleep(pause)
        waited += pause
        pause = min(0.05, pause * 1.5)
    return True


class StopFlag:
    """Flag that SIGTERM, SIGINT and SIGHUP set. A loop checks the flag between two steps."""

    def __init__(self) -> None:
        self.requested = False

    def install(self) -> StopFlag:
        """Install the signal handlers. Call it in the main thread. Under `nohup`, SIGHUP remains ignored."""
        self.requested = self.requested or _was_interrupted
        signal.signal(signal.SIGTERM, self._request)
        signal.signal(signal.SIGINT, self._request)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self._request)
        return self

    def _request(self, _number: int, _frame: FrameType | None) -> None:
        global _stop_requests
        self.requested = True
        _stop_requests += 1


_stop_requests = 0
_was_interrupted = False


def interrupt_on_signals() -> None:
    """Let SIGTERM and SIGHUP act like Ctrl-C until `StopFlag.install`, so that blocks clean up."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _interrupt)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    global _was_interrupted
    _was_interrupted = True  # Python ignores the exception in some callbacks, such as those after a fork
    raise KeyboardInterrupt


def stop_requests() -> int:
    """Return the number of stop signals that `StopFlag` has received in this process."""
    return _stop_requests


def stop_requested() -> bool:
    """Return True if `StopFlag` has received a stop signal in this process."""
    return _stop_requests > 0


def die_with_parent() -> None:
    """End this process when its launcher ends, even if the launcher is killed by SIGKILL.

    The kernel sends SIGKILL (PR_SET_PDEATHSIG). In a process without a launcher, the function does nothing.
    """
    launcher = int(os.environ.get("BUCKEYE_PARENT_PID", "0"))
    if not launcher:
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    import psutil

    parent = os.getppid()
    orphaned = parent == 1 and launcher != 1  # in a container, the launcher may be process 1
    if orphaned or not psutil.pid_exists(launcher):  # the launcher ended before the call of prctl
        os._exit(1)


def clean_environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of a server process: `given`, and a few harmless ones.

    The harmless variables are the paths of programs, home, temporary files and certificates, the language and
    the time zone. Other variables of this process, such as keys, are left out.
    """
    names = (*_INHERITED_VARIABLES, *_CERTIFICATE_VARIABLES)
    return {name: os.environ[name] for name in names if name in os.environ} | dict(given)


def is_secret(name: str) -> bool:
    """Return True if the name of a variable shows that it holds a key, a password or another secret."""
    return _SECRET_NAME.fullmatch(name) is not None and name != _SECRETS_VARIABLE


def hand_over_secrets(env: Mapping[str, str]) -> tuple[dict[str, str], int | None]:
    """Return the variables for a process of Buckeye without secrets, and the read end of a pipe with secrets.

    The caller passes the descriptor of the pipe to the process, and closes it. Without secrets, or if they do
    not fit into a pipe, all variables and None are returned.
    """
    secrets = {name: value for name, value in env.items() if is_secret(name)}
    data = json.dumps(secrets).encode()
    if not secrets or len(data) > _MAX_SECRETS_BYTES:
        return dict(env), None
    reading, writing = os.pipe()
    os.write(writing, data)
    os.close(writing)
    return {name: value for name, value in env.items() if name not in secrets} | {
        _SECRETS_VARIABLE: str(reading)
    }, reading


def receive_secrets() -> None:
    """Add the secrets from the pipe of `hand_over_secrets` to `os.environ`.

    Also erase secrets in /proc/PID/environ. Call this function before other threads exist.
    """
    descriptor = os.environ.pop(_SECRETS_VARIABLE, None)
    if descriptor is not None:
        with open(int(descriptor), "rb") as pipe:
            os.environ.update(json.load(pipe))
    with suppress(OSError, ValueError, IndexError):
        _blank_block({os.fsencode(name) for name in os.environ if is_secret(name)})


def forbid_tracing() -> None:
    """Forbid other processes of this user to trace this process and to read its memory.

    Processes that start third-party code call this function. Root can still trace this process.
    """
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def _blank_block(names: set[bytes]) -> None:
    """Overwrite variables in the memory that /proc/PID/environ shows. `os.environ` keeps its copies."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    start, end = int(fields[_ENV_START]), int(fields[_ENV_END])
    if not 0 < start < end:
        return
    for name in names:
        os.environb[name] = os.environb[name]  # makes `environ` of C point to a copy
    address = start
    for entry in ctypes.string_at(start, end - start).split(b"\0"):
        if entry.partition(b"=")[0] in names:
            ctypes.memset(address, 0, len(entry))
        address += len(entry) + 1


def remove_secrets(text: str, secrets: Iterable[str]) -> str:
    """Return a text with `(redacted)` in place of secrets. A failing server may have printed them."""
    for secret in secrets:
        if len(secret) >= _MIN_SECRET_LENGTH:
            text = text.replace(secret, "(redacted)")
    return text
