"""Loopback ports for the servers of tests."""

import fcntl
import os
import socket
from pathlib import Path

_CHOICE = iter(range(12000, 20000))
"""Below those of outgoing connections, and apart from those that a run chooses by itself."""

_held = []


def free_port() -> int:
    """One that nobody listens on, and that no other test gets as long as this process lives.

    A port that the kernel chose is given to the next who asks as soon as it is let go: a server that starts
    slowly finds another there, and its test talks to that one.
    """
    folder = Path("/tmp", f"buckeye-ports-{os.getuid()}")  # of all sessions, so that two never share a port
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
