"""Host keys of ssh servers: the first key is recorded, and a different one is rejected later."""

from __future__ import annotations

import os
from pathlib import Path

from buckeye.remote.base import SshTarget


def known_keys(path: Path, target: SshTarget) -> list[str]:
    """Return the recorded keys of a server, as `TYPE BASE64`; empty for a new server."""
    if not path.is_file():
        return []
    name = _name(target)
    words = (line.split() for line in path.read_text(encoding="utf-8", errors="replace").splitlines())
    return [f"{word[1]} {word[2]}" for word in words if len(word) >= 3 and word[0] == name]


def record_key(path: Path, target: SshTarget, key: str) -> None:
    """Record the key (`TYPE BASE64`) of a new server, in the format of ssh."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = f"{_name(target)} {key}\n".encode()
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(handle, line)
        os.fsync(handle)
    finally:
        os.close(handle)


def _name(target: SshTarget) -> str:
    """Return the name of a server as OpenSSH writes it: with the port unless it is 22."""
    return target.host if target.port == 22 else f"[{target.host}]:{target.port}"
