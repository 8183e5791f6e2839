"""End a job and its rented machine if no local process supervises the job any more.

Usage: `python -m buckeye.remote.pod.watchdog JOB`.

The settings are `dead_man` in `job.json`: `{"seconds", "expires": epoch | null, "grace", "machine": null |
{"url"}}`. Each request of the supervising process touches the file `heartbeat`. If the file does not change
for `seconds`, or at the time `expires`, the watchdog sends SIGTERM to the job, so that the job writes a
checkpoint, and SIGKILL after `grace` seconds. Then the watchdog ends the machine. If the key BUCKEYE_POD_KEY
is set, it sends `DELETE url` to the provider; otherwise it shuts the machine down. Without `machine` (a host
of the user), it ends only the job.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

from buckeye.base.storage import is_locked, try_lock, write_file
from buckeye.remote.pod.wrapper import read_job

_POLL_SECONDS = 1.0
_ATTEMPTS = 20
_LONGEST_PAUSE = 60.0


def watch(folder: Path) -> None:
    """Wait until the job must be ended, and end it. On a host of the user, return when the job has ended."""
    if try_lock(folder / "dead_man.lock") is None:
        return
    settings: dict[str, Any] = read_job(folder)["dead_man"]
    silence = _Silence(folder / "heartbeat")
    while (reason := _reason(settings, silence.seconds())) is None:
        if settings["machine"] is None and (folder / "rc").exists():
            return
        time.sleep(_POLL_SECONDS)
    with suppress(OSError):  # a full disk must not keep the machine alive
        write_file(folder / "dead_man", reason)
    _say(f"{reason}: sending SIGTERM to the job")
    _end_job(folder, float(settings["grace"]))
    if settings["machine"] is not None:
        _end_machine(settings["machine"])


class _Silence:
    """Time since the file `heartbeat` has changed, on a clock that cannot be set."""

    def __init__(self, heartbeat: Path) -> None:
        self._heartbeat, self._seen, self._since = heartbeat, 0.0, time.monotonic()

    def seconds(self) -> float:
        with suppress(OSError):  # a missing file does not change
            changed = self._heartbeat.stat().st_mtime
            if changed != self._seen:
                self._seen, self._since = changed, time.monotonic()
        return time.monotonic() - self._since


def _reason(settings: dict[str, Any], silent: float) -> str | None:
    """Return the reason to end the job now, or None if it may continue."""
    if settings["expires"] is not None and time.time() >= settings["expires"]:
        return "--max-hours has passed"
    if silent > settings["seconds"]:
        return f"no client has managed this job for {silent / 60:.1f} minutes"
    return None


def _end_job(folder: Path, grace: float) -> None:
    """Send SIGTERM to the wrapper, which forwards it to the job. Send SIGKILL after `grace` seconds."""
    deadline = time.monotonic() + grace
    number = signal.SIGTERM
    while is_locked(folder / "lock"):
        try:
            os.kill(int((folder / "pid").read_text()), number)
        except (OSError, ValueError) as error:
            _say(f"cannot send a signal to the job: {error}")
        while is_locked(folder / "lock") and (number == signal.SIGTERM and time.monotonic() < deadline):
            time.sleep(_POLL_SECONDS)
        if number == signal.SIGKILL:
            time.sleep(_POLL_SECONDS)
            return
        number = signal.SIGKILL


def _end_machine(machine: dict[str, Any]) -> None:
    """End the machine through the API of the provider. If this fails, shut it down."""
    key = os.environ.get("BUCKEYE_POD_KEY")
    pause = 1.0
    for _ in range(_ATTEMPTS if key else 0):
        request = urllib.request.Request(  # noqa: S310  an https URL of the provider
            machine["url"], method="DELETE", headers={"Authorization": f"Bearer {key}"}
        )
        try:
            with urllib.request.urlopen(request, timeout=30):  # noqa: S310  an https URL of the provider
                _say("the provider has accepted the request to end the machine")
                return
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return
            _say(f"the provider responds with status {error.code}")
            if error.code in (401, 403):
                break
        except OSError as error:
            _say(f"no response from the provider: {error}")
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    try:
        subprocess.run(["shutdown", "-h", "now"], check=False, timeout=60)  # noqa: S607  systems have it in different folders
    except (OSError, subprocess.TimeoutExpired) as error:
        _say(f"cannot shut down the machine: {error}")


def _say(text: str) -> None:
    with suppress(OSError):  # the disk of the log may be full
        print(time.strftime("%Y-%m-%d %H:%M:%S"), text, flush=True)


if __name__ == "__main__":
    watch(Path(sys.argv[1]))
