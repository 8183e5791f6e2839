"""Files around a folder that an attack may try to change."""

from __future__ import annotations

import os
from pathlib import Path


class Surroundings:
    """Folder of another user next to the attacked one, with its state at construction."""

    def __init__(self, folder: Path) -> None:
        self.victim = folder / "victim"
        (self.victim / ".ssh").mkdir(parents=True, mode=0o700)
        (self.victim / ".ssh").chmod(0o700)
        (self.victim / ".ssh/authorized_keys").write_text("mine")
        (self.victim / ".ssh/authorized_keys").chmod(0o600)
        (self.victim / "link").symlink_to(".ssh")
        self._before = self._seen()

    def untouched(self) -> bool:
        """Return True if every name, mode, owner, time and content is unchanged."""
        return self._seen() == self._before

    def _seen(self) -> list[object]:
        found = []
        for path in sorted([self.victim, *self.victim.rglob("*")]):
            status = os.lstat(path)
            content = path.read_bytes() if path.is_file() else b""
            kept = (status.st_mode, status.st_uid, status.st_gid, status.st_nlink, status.st_mtime_ns)
            found.append((str(path), *kept, content))
        return found
