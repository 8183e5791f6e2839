"""Private folder of a gateway, and cleanup after killed gateways.

A gateway is alive while it holds the lock of its folder. The lock ends with the process in any case.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from buckeye.base.storage import is_locked
from buckeye.mcp.gateway.running_environment import remove_tree

log = logging.getLogger(__name__)


@contextmanager
def open_process_folder(root: Path) -> Iterator[Path]:
    """Yield a new folder under `root`, removed at the end. Folders of dead gateways are removed first."""
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (root / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _remove_dead(root)
        folder = root / f"{os.getpid()}-{secrets.token_hex(4)}"
        folder.mkdir(mode=0o700)
        held = os.open(folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(held, fcntl.LOCK_EX)
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):
            remove_tree(folder)
        os.close(held)


def is_in_use(folder: Path) -> bool:
    """Return True if a running gateway holds the lock of this folder."""
    return is_locked(folder / "lock")


def _remove_dead(root: Path) -> None:
    for folder in root.iterdir():
        if not folder.is_dir() or is_in_use(folder):
            continue
        places = [path for path in folder.iterdir() if path.is_dir()]
        try:
            remove_tree(folder)
            log.info("Removed what a gateway that was killed has left: %d folders of sessions", len(places))
        except OSError as error:
            log.warning("%s is left of a gateway that was killed, and cannot be removed: %s", folder, error)
