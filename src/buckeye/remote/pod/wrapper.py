"""Run a job and record its exit code: `python -m buckeye.remote.pod.wrapper JOB`.

Files in the folder JOB:

- `job.json`: the settings of the job (see `read_job`)
- `env`: keys as JSON. Only the user of the job can read the file. This process reads it and deletes it.
- `lock`: locked while this process lives
- `pid`: id of this process
- `log`: output of the job
- `rc`: exit code of the job, written after all other files
- `wrapper.log`: errors of this process
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from buckeye.base.storage import try_lock, write_file

RUNS_ALREADY, ENDED_ALREADY = 73, 74


def read_job(folder: Path) -> dict[str, Any]:
    """Return the content of `job.json`: `argv`, `cwd`, `env`, `output_dir` and `dead_man`.

    `output_dir` is relative to `cwd`, or absolute. `dead_man` has the settings of `watchdog`.
    """
    found: dict[str, Any] = json.loads((folder / "job.json").read_text())
    return found


def carry_out(folder: Path) -> int:
    """Run the job, unless it runs or has already ended, and return its exit code."""
    if try_lock(folder / "lock") is None:
        return RUNS_ALREADY
    if (folder / "rc").exists():
        return ENDED_ALREADY
    children: list[subprocess.Popen[bytes]] = []
    asked = _forward_signals(children)
    write_file(folder / "pid", str(os.getpid()))
    job = read_job(folder)
    secrets = _take_secrets(folder / "env")
    if job["dead_man"] is not None:
        _start_watchdog(folder, secrets)
    secrets.pop("BUCKEYE_POD_KEY", None)  # only the watchdog needs this key
    code = 128 + signal.SIGTERM if asked else _run(job, folder / "log", secrets, children, asked)
    write_file(folder / "rc", str(code))
    return code


def _take_secrets(path: Path) -> dict[str, str]:
    try:
        text = path.read_text()
    except FileNotFoundError:
        return {}
    path.unlink()
    found: dict[str, str] = json.loads(text)
    return found


def _start_watchdog(folder: Path, secrets: dict[str, str]) -> None:
    """Start the watchdog in its own session, so that it continues if this process is killed."""
    key = {name: secrets[name] for name in ("BUCKEYE_POD_KEY",) if name in secrets}
    with (folder / "dead_man.log").open("ab") as log:
        subprocess.Popen(  # noqa: S603  a list of args, without a shell
            [sys.executable, "-P", "-m", "buckeye.remote.pod.watchdog", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **key},
            start_new_session=True,
        )


def _forward_signals(children: list[subprocess.Popen[bytes]]) -> list[int]:
    """Send SIGTERM to the children when this process gets a signal. Return the list of received signals."""
    asked: list[int] = []

    def forward(number: int, _frame: object) -> None:
        asked.append(number)
        for child in children:
            child.send_signal(signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, forward)
    return asked


def _run(
    job: dict[str, Any],
    log: Path,
    secrets: dict[str, str],
    children: list[subprocess.Popen[bytes]],
    asked: list[int],
) -> int:
    plain = {"LC_ALL": "C.UTF-8", "PYTHONUTF8": "1", "PYTHONUNBUFFERED": "1"}
    with log.open("ab") as out:
        try:
            child = subprocess.Popen(  # noqa: S603  a list of args, without a shell
                job["argv"],
                cwd=job["cwd"],
                env={**os.environ, **plain, **job["env"], **secrets},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                preexec_fn=_end_with_parent,
            )
        except OSError as error:
            out.write(f"error: the job cannot be started: {error}\n".encode())
            return 126
        children.append(child)
        if asked:  # a signal arrived before the child existed
            child.send_signal(signal.SIGTERM)
        code = child.wait()
    return code if code >= 0 else 128 - code


def _end_with_parent() -> None:
    """Let the kernel send SIGTERM to the job when its parent dies, so that the job can write a checkpoint."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(carry_out(Path(sys.argv[1])))
