"""The ledger: one file per pod of this user, written before the pod is ordered, so that no pod is forgotten.

Next to `NAME.json` are `NAME.lock`, locked by the process that supervises the pod, and `NAME.known_hosts`
with the keys of its ssh server.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from buckeye.base.keys import home_folder
from buckeye.base.storage import is_locked, try_lock
from buckeye.errors import RemoteError, UsageError
from buckeye.run_files.record import read_struct, write_struct

log = logging.getLogger(__name__)

_SECONDS_AN_HOUR = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PodEntry:
    """The record of one pod. Times are in seconds since the epoch.

    Without `pod_id` it is unknown if the pod was created; the provider must be queried by name. `ended` is
    when its end was confirmed, or when it was found to be gone. `expires` is when `max_hours` are over.
    """

    name: str
    run_id: str
    provider: str
    gpus: str
    price_per_hour: float
    ordered: float
    pod_id: str | None = None
    ssh: tuple[str, ...] = ()
    identity_file: str | None = None
    expires: float | None = None
    keep: bool = False
    ended: float | None = None
    outcome: str | None = None

    def hours(self, now: float) -> float:
        """Return the billed hours so far, from the order on."""
        return max(0.0, (self.ended if self.ended is not None else now) - self.ordered) / _SECONDS_AN_HOUR

    def cost(self, now: float) -> float:
        """Return the cost in US dollars at the confirmed price; 0 if the pod was never created."""
        made = self.pod_id is not None or self.ended is None
        return self.hours(now) * self.price_per_hour if made else 0.0


class Ledger:
    """The files of all pods, in `$BUCKEYE_HOME/pods`, by default `~/.buckeye/pods`."""

    def __init__(self) -> None:
        self.folder = home_folder() / "pods"

    def write(self, entry: PodEntry) -> PodEntry:
        """Record a pod durably."""
        write_struct(self._file(entry.name, "json"), entry)
        return entry

    def read(self, name: str) -> PodEntry:
        """Return the record of a pod. Raises UsageError if it is damaged."""
        return read_struct(self._file(name, "json"), PodEntry, hint="`buckeye rl pods gc` asks the provider")

    def entries(self) -> list[PodEntry]:
        """Return all pods, oldest first.

        A damaged file is skipped with a warning; its pod can still be found at the provider by name.
        """
        found = []
        for path in sorted(self.folder.glob("*.json")):
            try:
                found.append(self.read(path.stem))
            except UsageError as error:
                log.warning("Skipping an unreadable pod record: %s", error)
        return sorted(found, key=lambda entry: entry.ordered)

    def end(self, entry: PodEntry, *, outcome: str) -> PodEntry:
        """Record the end of a pod, and delete its ssh host keys, because addresses are reused.

        A write error is only a warning, because the pod is gone anyway.
        """
        ended = dataclasses.replace(entry, ended=time.time(), outcome=outcome)
        try:
            self.write(ended)
            for kind in ("known_hosts", "lock"):
                self._file(entry.name, kind).unlink(missing_ok=True)
        except OSError as error:
            log.warning("Cannot record the end of pod %s: %s", entry.name, error)
        return ended

    def known_hosts(self, name: str) -> Path:
        """Return the path of the file with the keys of a pod's ssh server."""
        return self._file(name, "known_hosts")

    def is_supervised(self, name: str) -> bool:
        """Return True if a running process supervises the pod and will end it."""
        return is_locked(self._file(name, "lock"))

    @contextmanager
    def mark_supervised(self, name: str) -> Iterator[None]:
        """Hold a pod's lock during the block. Raises RemoteError if another process holds it."""
        path = self._file(name, "lock")
        handle = try_lock(path)
        if handle is None:
            raise RemoteError(f"another process manages this pod: {path} is locked", code="BK-RUN-ACTIVE")
        try:
            yield
        finally:
            os.close(handle)

    def _file(self, name: str, kind: str) -> Path:
        return self.folder / f"{name}.{kind}"


def hours_text(hours: float) -> str:
    """Return hours as text: `1.25 h`, or minutes below one hour."""
    return f"{hours:.2f} h" if hours >= 1 else f"{hours * 60:.0f} min"
