"""Stands in for a worker on another node: `python -m buckeye.workers.relay --fd N`.

What comes through the connection goes to the node, and what the node sends comes back: the worker's messages,
what it prints, and its exit code, with which this process ends. If one of the two is lost, so is the other.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time

from buckeye.workers.worker_side.frames import HEADER, body_length, decode

_CHUNK = 1 << 16
_RETRY_SECONDS = 0.5
_LOST_MILLISECONDS = 15_000  # of a node that confirms nothing; a worker is asked every two seconds


def _exactly(connection: socket.socket, count: int) -> bytes:
    """So many bytes. Raises ConnectionError if it ends before."""
    data = bytearray()
    while len(data) < count:
        chunk = connection.recv(min(count - len(data), _CHUNK))
        if not chunk:
            raise ConnectionError("closed")
        data += chunk
    return bytes(data)


def _frame(connection: socket.socket) -> bytes:
    header = _exactly(connection, HEADER.size)
    return header + _exactly(connection, body_length(header))


def _connected(host: str, port: int, seconds: float) -> socket.socket:
    """A connection to the node, whose host of workers may just be starting."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            far = socket.create_connection((host, port), timeout=seconds)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConnectionError(f"{host}:{port} does not answer: {error}") from None
        time.sleep(_RETRY_SECONDS)
    far.settimeout(None)
    far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        far.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _LOST_MILLISECONDS)
    return far


def _send(near: socket.socket, far: socket.socket) -> None:
    """Until the connection ends, which is that the worker is no longer wanted."""
    while data := near.recv(_CHUNK):
        far.sendall(data)
    os._exit(1)


def main() -> None:
    """Begin with the first message, which says where the node is and what to start there."""
    near = socket.socket(fileno=int(sys.argv[sys.argv.index("--fd") + 1]))
    try:
        first = _frame(near)
        place = decode(first[HEADER.size :])
        far = _connected(place["host"], place["port"], place["seconds"])
        far.sendall(first)
        threading.Thread(target=_send, args=(near, far), daemon=True).start()
        while True:
            data = _frame(far)
            said = decode(data[HEADER.size :])
            if said["type"] == "printed":
                os.write(1, said["text"].encode("latin-1"))
            elif said["type"] == "ended":
                os._exit(said["code"] if said["code"] >= 0 else 128 - said["code"])
            else:
                near.sendall(data)
    except OSError as error:
        print(f"the node of the worker is lost: {error}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)  # chance has ended it, as a signal does


if __name__ == "__main__":
    main()
