"""Local stand-in for a worker on another node: `python -m buckeye.workers.relay --fd N`.

It forwards the connection to the node, and forwards the node's data back: the worker's messages, its output,
and its exit code, which becomes that of this process. If one side is lost, the other ends too.
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
_LOST_MILLISECONDS = 15_000  # until a node that does not acknowledge counts as lost; heartbeats are every 2 s


def _exactly(connection: socket.socket, count: int) -> bytes:
    """Read `count` bytes. Raises ConnectionError if the connection ends before."""
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
    """Connect to the node, and retry while its worker host may be starting."""
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
    """Forward data until the connection ends, which means that the worker is no longer needed."""
    while data := near.recv(_CHUNK):
        far.sendall(data)
    os._exit(1)


def main() -> None:
    """Read the first message, which names the node and the worker to start, then forward both ways."""
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
        os.kill(os.getpid(), signal.SIGKILL)  # report the loss as chance, like a kill by a signal


if __name__ == "__main__":
    main()
