"""Environment variables with keys in them: out of sight of other processes of the same user.

`/proc/PID/environ` shows the variables that a process was started with, to whoever runs as the same user:
also to an environment's code, which is given none of them. So a process that we start gets them by a pipe,
and one that a shell has started blanks them where the kernel looks.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

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
