"""Asking a run to stop: by signals here, from another node, or from any host that shares its directory."""

from __future__ import annotations

import time
from pathlib import Path

from buckeye.base.process import StopFlag
from buckeye.base.storage import write_file
from buckeye.cluster.head import Nodes

STOP_FILE = "stop"
"""The file in the output directory that asks the launcher, wherever it is, to end its run."""

_LOOK_SECONDS = 2.0


class Stopping:
    """Whether the run is to end. Requests that were left for an earlier start do not count."""

    def __init__(self, output_dir: Path, stop: StopFlag, nodes: Nodes | None) -> None:
        self._path = output_dir / STOP_FILE
        self._stop, self._nodes = stop, nodes
        self._asked = False
        self._look_at = 0.0
        self._path.unlink(missing_ok=True)

    def requested(self) -> bool:
        """To be called again and again."""
        now = time.monotonic()
        if now >= self._look_at and not self._asked:
            self._look_at = now + _LOOK_SECONDS
            self._asked = self._path.exists()
        by_node = self._nodes is not None and self._nodes.stop_asked
        return self._stop.requested or self._asked or by_node


def request_stop(output_dir: Path) -> None:
    """Leave a request for the launcher of a run, wherever that is."""
    write_file(output_dir / STOP_FILE, "")


def withdraw_stop(output_dir: Path) -> None:
    """Nobody has answered."""
    (output_dir / STOP_FILE).unlink(missing_ok=True)
