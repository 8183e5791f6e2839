"""Loopback ports for the servers of tests."""

import fcntl
import os
import socket
from pathlib import Path

_CHOICE = iter(range(12000, 20000))
"""Ports below those of outgoing connections, and different from those that a run chooses itself."""

_held = []


def free_port() -> int:
    """Return a free port that no other test receives while this process lives.

    The kernel would give a released port to the next caller immediately. Another server could then
    occupy the port of a server that starts slowly, and its test would talk to the wrong one.
    """
    folder = Path("/tmp", f"buckeye-ports-{os.getuid()}")  # shared by all sessions: no two use one port
    folder.mkdir(exist_ok=True)
    for port in _CHOICE:
        lock = (folder / str(port)).open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))
        except OSError:
            lock.close()
        else:
            _held.append(lock)
            return port
    raise AssertionError("no port of the tests is free")
