"""What every Buckeye process does about being a process: identity, threads, stopping, dying with its parent,
and keeping keys in its environment variables from others of the same user."""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Protocol

from buckeye.base.process_guard import GUARD


@dataclass(frozen=True, kw_only=True, slots=True)
class RunIdentity:
    """Which run a file belongs to. `attempt` counts the starts of the run, so a resumed run never reads the
    leftovers of the one before."""

    run_id: str
    attempt: int


_INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ")
_CERTIFICATES = (
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "NODE_EXTRA_CA_CERTS",
)

STORE_VARIABLE = "BUCKEYE_STORE"
"""The environment variable that names the file by which the trainer ranks of one host find each other."""


def run_identity() -> RunIdentity:
    """The identity handed down by the launcher; processes started by hand share the default one."""
    return RunIdentity(
        run_id=os.environ.get("BUCKEYE_RUN_ID", "local"), attempt=int(os.environ.get("BUCKEYE_ATTEMPT", "1"))
    )


def cpu_threads() -> int:
    """How many compute threads this process may use on a CPU: the launcher's share, or every core."""
    return int(os.environ.get("BUCKEYE_THREADS", "0")) or usable_cores()


def usable_cores() -> int:
    """Processors that this process may use: its affinity, and a container's quota (cgroup v2 `cpu.max`)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no cgroup v2, or no quota ("max")
        return cores


def idle_spins(*, cores_to_itself: bool) -> str:
    """How often an idle OpenMP thread looks for work before it sleeps (GOMP_SPINCOUNT); the user's own value
    if there is one.

    A small model's next operation comes after some microseconds, and waking a thread takes longer: who has
    the cores to itself while it computes is 1.1 to 1.7 times as fast if its threads stay awake for 5,000
    looks. Beside another program that computes it is up to 1.9 times as slow, so a thousand are enough there;
    with the library's default, of hundreds of thousands, it is ten times as slow.
    """
    return os.environ.get("GOMP_SPINCOUNT", "5000" if cores_to_itself else "1000")


_OPEN_FILES = 65_536  # where the system names no most


def raise_open_files_limit() -> None:
    """Let this process and its children have as many open files and connections as this user may have: every
    rollout that is played has some, and systems begin with 256 or 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard if hard != resource.RLIM_INFINITY else _OPEN_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    with suppress(ValueError, OSError):  # some systems have a lower limit than the one they name
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


INTERRUPTED = 130
"""Exit code of a command that SIGTERM, SIGINT or SIGHUP ended before its work was done."""


def run_program(
    argv: Sequence[str], *, seconds: float, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end and keep what it prints; nobody answers what it may ask. Raises OSError if it
    cannot be started, `subprocess.TimeoutExpired` if it takes longer than `seconds`."""
    return subprocess.run(  # noqa: S603  a list of words, without a shell
        argv,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=seconds,
        env=env,
        check=False,
    )


class ChildProcess:
    """A program that was started in a session of its own, and all that it starts there: they end together.

    Its outputs go where those of this process go unless they are given. If it is `guarded`, its session ends
    with this process too, however that ends. Raises OSError if it cannot be started.
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
        self._process = subprocess.Popen(  # noqa: S603  a list of words, without a shell
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
        """None while it runs. What is left of its session is killed as soon as its end is seen: later the
        number may be another process's."""
        if self._process.returncode is None and self._process.poll() is not None:
            self._over()
        return self._process.returncode

    def signal(self, number: int, *, session: bool) -> None:
        """Send a signal to it, or to all of its session; to nobody once it has ended."""
        if self.returncode is None:
            (self._kill if session else self._process.send_signal)(number)

    def wait(self, seconds: float | None = None) -> int:
        """Its exit code. Raises `subprocess.TimeoutExpired` if it runs on for longer."""
        if self._process.returncode is None:
            self._process.wait(seconds)
            self._over()
        return self._process.returncode

    def end(self, seconds: float, *, session: bool) -> bool:
        """SIGTERM to it, or to all of its session; what is left after so many seconds is killed. Whether it
        ended in time."""
        self.signal(signal.SIGTERM, session=session)
        try:
            self.wait(seconds)
        except subprocess.TimeoutExpired:
            self._kill(signal.SIGKILL)
            self.wait()
            return False
        return True

    def _over(self) -> None:
        self._kill(signal.SIGKILL)
        if self._guarded:
            GUARD.forget(self.pid)

    def _kill(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):  # macOS names the second for one that has ended
            os.killpg(self.pid, number)


class AsyncChild(Protocol):
    """A child process as asyncio starts it."""

    @property
    def returncode(self) -> int | None:
        """None while it runs."""


async def ends_within(process: AsyncChild, seconds: float) -> bool:
    """Whether a child process ends within `seconds`. Unlike `wait()`, does not wait for its pipes, which a
    grandchild may keep open."""
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
    """Turns SIGTERM, SIGINT and SIGHUP into a flag that a loop looks at between two steps."""

    def __init__(self) -> None:
        self.requested = False

    def install(self) -> StopFlag:
        """Register for the signals; call from the main thread. Under `nohup` SIGHUP remains ignored."""
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


def stop_requests() -> int:
    """How often a `StopFlag` of this process was raised: for waits that do not know the flag."""
    return _stop_requests


def stop_requested() -> bool:
    """Whether one ever was."""
    return _stop_requests > 0


def die_with_parent() -> None:
    """Make sure this process ends when its launcher does, even if the launcher is SIGKILLed.

    On Linux the kernel sends SIGKILL (PR_SET_PDEATHSIG); elsewhere a thread watches the parent's pid. Does
    nothing in a process that no launcher started.
    """
    launcher = int(os.environ.get("BUCKEYE_PARENT_PID", "0"))
    if not launcher:
        return
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    import psutil

    parent = os.getppid()
    orphaned = parent == 1 and launcher != 1  # in a container the launcher may be process 1 itself
    if orphaned or not psutil.pid_exists(launcher):  # it died before the request took effect
        os._exit(1)
    if sys.platform != "linux":
        threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def clean_environment(given: Mapping[str, str]) -> dict[str, str]:
    """What a server's process sees: where programs, home, temporary files and certificates are, the language,
    and what the task gives it. Nothing else of this process's environment: no key, no setting."""
    kept = (*_INHERITED, *_CERTIFICATES)
    return {name: os.environ[name] for name in kept if name in os.environ} | dict(given)


_NAME = re.compile(
    r"(.*_)?(API)?(KEY|KEYS|TOKEN|TOKENS|SECRET|SECRETS|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|PAT)(_.*)?",
    re.I,
)
_HANDED_OVER = "BUCKEYE_SECRETS_FD"
_ENV_START, _ENV_END = 47, 48  # of what follows the name in /proc/PID/stat, see proc_pid_stat(5)
_PR_SET_DUMPABLE = 4
_SHORTEST_SECRET = 6
_MOST_BYTES = 60_000  # a pipe holds that without a reader


def is_secret(name: str) -> bool:
    """Whether a variable of that name holds a key, a password or the like."""
    return _NAME.fullmatch(name) is not None and name != _HANDED_OVER


def handed_over(env: Mapping[str, str]) -> tuple[dict[str, str], int | None]:
    """The variables to start a Buckeye process with, and the end of a pipe that holds the others, to be
    passed on to it and closed here; None if there are none, or more than a pipe takes."""
    secrets = {name: value for name, value in env.items() if is_secret(name)}
    data = json.dumps(secrets).encode()
    if not secrets or len(data) > _MOST_BYTES:
        return dict(env), None
    reading, writing = os.pipe()
    os.write(writing, data)
    os.close(writing)
    return {name: value for name, value in env.items() if name not in secrets} | {
        _HANDED_OVER: str(reading)
    }, reading


def take_secrets() -> None:
    """Take what was handed over to this process, and let nobody see what it was started with. To be called
    first of all: later there are other threads."""
    descriptor = os.environ.pop(_HANDED_OVER, None)
    if descriptor is not None:
        with open(int(descriptor), "rb") as pipe:
            os.environ.update(json.load(pipe))
    if sys.platform == "linux":
        with suppress(OSError, ValueError, IndexError):
            _blank_block({os.fsencode(name) for name in os.environ if is_secret(name)})


def forbid_looking() -> None:
    """Let no process of this user read the memory of this one, or trace it. (Root may, where it has the right
    to trace.) For processes that start code of others."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def _blank_block(names: set[bytes]) -> None:
    """Write zeros over variables where the kernel put them; this program has copies from then on."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    start, end = int(fields[_ENV_START]), int(fields[_ENV_END])
    if not 0 < start < end:
        return
    for name in names:
        os.environb[name] = os.environb[name]  # C's `environ` points to a copy now
    place = start
    for entry in ctypes.string_at(start, end - start).split(b"\0"):
        if entry.partition(b"=")[0] in names:
            ctypes.memset(place, 0, len(entry))
        place += len(entry) + 1


def without_secrets(text: str, secrets: Iterable[str]) -> str:
    """A message without the secrets that a server was given, and may have printed when it failed."""
    for secret in secrets:
        if len(secret) >= _SHORTEST_SECRET:
            text = text.replace(secret, "(redacted)")
    return text
