"""The ledger of pods: one file `NAME.json` per pod of this user.

The file is written before the pod is ordered, so that no pod is forgotten. The process that supervises the
pod locks `NAME.lock`. `NAME.known_hosts` has the host keys of the ssh server of the pod.
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

    Without `pod_id`, it is unknown whether the order created the pod; search for its name at the provider.
    `ended` is the time when the provider confirmed the end of the pod, or did not know the pod any more.
    `expires` is the time when `max_hours` have passed.
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
        """Return the hours from the order to the end of the pod, or to `now`."""
        return max(0.0, (self.ended if self.ended is not None else now) - self.ordered) / _SECONDS_AN_HOUR

    def cost(self, now: float) -> float:
        """Return the cost in US dollars at the confirmed price, or 0 if the pod was never created."""
        made = self.pod_id is not None or self.ended is None
        return self.hours(now) * self.price_per_hour if made else 0.0


class Ledger:
    """The files of all pods, in `$BUCKEYE_HOME/pods`, by default `~/.buckeye/pods`."""

    def __init__(self) -> None:
        self.folder = home_folder() / "pods"

    def write(self, entry: PodEntry) -> PodEntry:
        """Write the record of a pod to disk."""
        write_struct(self._file(entry.name, "json"), entry)
        return entry

    def read(self, name: str) -> PodEntry:
        """Return the record of a pod. Raises UsageError if it is damaged."""
        hint = "`buckeye rl pods gc` lists pods from the provider"
        return read_struct(self._file(name, "json"), PodEntry, hint=hint)

    def entries(self) -> list[PodEntry]:
        """Return the records of all pods, oldest first.

        A damaged file is skipped with a warning. The provider still lists its pod by name.
        """
        found = []
        for path in sorted(self.folder.glob("*.json")):
            try:
                found.append(self.read(path.stem))
            except UsageError as error:
                log.warning("Skipping an unreadable pod record: %s", error)
        return sorted(found, key=lambda entry: entry.ordered)

    def end(self, entry: PodEntry, *, outcome: str) -> PodEntry:
        """Record the end of a pod, and delete its ssh host keys, because another pod may get its address.

        A write error is only a warning, because the pod has ended.
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
        """Return the path of the file with the ssh host keys of a pod."""
        return self._file(name, "known_hosts")

    def is_supervised(self, name: str) -> bool:
        """Return True if a running process supervises the pod and will end it."""
        return is_locked(self._file(name, "lock"))

    @contextmanager
    def mark_supervised(self, name: str) -> Iterator[None]:
        """Hold the lock of a pod during the block. Raises RemoteError if another process holds the lock."""
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
