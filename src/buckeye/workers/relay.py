"""Local stand-in for a worker on another node: `python -m buckeye.workers.relay --fd N`.

The relay forwards Buckeye's messages to the worker, and the worker's messages and output to Buckeye. It exits
with the exit code of the worker. If it loses the connection to one side, it also ends the other connection.
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
_LOST_MILLISECONDS = 15_000  # a node that acknowledges no data for this time is lost; heartbeats: every 2 s


def _connect(host: str, port: int, seconds: float) -> socket.socket:
    """Connect to the node. Retry for `seconds`, because its worker host may still be starting."""
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
    node.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _LOST_MILLISECONDS)
    return node


def _send(buckeye: socket.socket, node: socket.socket) -> None:
    """Forward Buckeye's data to the node. When Buckeye closes the connection, end this process."""
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
                if frame["code"] < 0:  # end like the worker, because the pool retries a killed one
                    os.kill(os.getpid(), -frame["code"])
                os._exit(frame["code"] if frame["code"] >= 0 else 128 - frame["code"])
            else:
                buckeye.sendall(HEADER.pack(len(body)) + body)
    except OSError as error:
        print(f"lost the connection to the worker's node: {error}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)  # the pool retries a worker that a signal has killed


if __name__ == "__main__":
    main()
