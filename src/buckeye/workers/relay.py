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

from buckeye.workers.worker_side.frames import HEADER, decode, receive_body

_CHUNK = 1 << 16
_RETRY_SECONDS = 0.5
_LOST_MILLISECONDS = 15_000  # until a node that does not acknowledge counts as lost; heartbeats are every 2 s


def _connect(host: str, port: int, seconds: float) -> socket.socket:
    """Connect to the node, and retry while its worker host may be starting."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            node = socket.create_connection((host, port), timeout=seconds)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConnectionError(f"cannot connect to {host}:{port}: {error}") from None
        time.sleep(_RETRY_SECONDS)
    node.settimeout(None)
    node.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        node.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _LOST_MILLISECONDS)
    return node


def _send(buckeye: socket.socket, node: socket.socket) -> None:
    """Forward data until the connection ends, which means that the worker is no longer needed."""
    while data := buckeye.recv(_CHUNK):
        node.sendall(data)
    os._exit(1)


def main() -> None:
    """Read the first message, which names the node and the worker to start, then forward both ways."""
    buckeye = socket.socket(fileno=int(sys.argv[sys.argv.index("--fd") + 1]))
    try:
        request = receive_body(buckeye)
        address = decode(request)
        node = _connect(address["host"], address["port"], address["seconds"])
        node.sendall(HEADER.pack(len(request)) + request)
        threading.Thread(target=_send, args=(buckeye, node), daemon=True).start()
        while True:
            body = receive_body(node)
            frame = decode(body)
            if frame["type"] == "printed":
                os.write(1, frame["text"].encode("latin-1"))
            elif frame["type"] == "ended":
                os._exit(frame["code"] if frame["code"] >= 0 else 128 - frame["code"])
            else:
                buckeye.sendall(HEADER.pack(len(body)) + body)
    except OSError as error:
        print(f"lost the connection to the worker's node: {error}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)  # the pool retries after a kill by a signal


if __name__ == "__main__":
    main()
