"""Proxy for a port that can be made slow, cut, silent or closed; runs in a thread."""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_PIECE = 65536


class Proxy:
    """Proxy for one port with `delay` seconds each way; if `silent`, it discards all data."""

    def __init__(self, port: int, *, delay: float = 0.0, listener: socket.socket | None = None) -> None:
        self._target, self._delay = port, delay
        self.silent = False
        self.refusing = False
        self._open: list[socket.socket] = []
        self._listener = listener or socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def reset(self) -> None:
        """Reset all connections."""
        for one in self._open:
            with contextlib.suppress(OSError):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                one.shutdown(socket.SHUT_RD)
            one.close()
        self._open.clear()

    def close(self) -> None:
        self.refusing = True
        self._listener.close()
        self.reset()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.refusing:
                client.close()
                continue
            server = socket.create_connection(("127.0.0.1", self._target))
            self._open += [client, server]
            for source, sink in ((client, server), (server, client)):
                pieces: queue.Queue = queue.Queue()
                threading.Thread(target=self._read, args=(source, pieces), daemon=True).start()
                threading.Thread(target=self._write, args=(sink, pieces), daemon=True).start()

    def _read(self, source: socket.socket, pieces: queue.Queue) -> None:
        piece = b"?"
        while piece:
            try:
                piece = source.recv(_PIECE)
            except OSError:
                piece = b""
            pieces.put((time.monotonic() + self._delay, piece))

    def _write(self, sink: socket.socket, pieces: queue.Queue) -> None:
        while True:
            due, piece = pieces.get()
            time.sleep(max(0.0, due - time.monotonic()))
            if self.silent:
                continue
            try:
                sink.sendall(piece) if piece else sink.shutdown(socket.SHUT_WR)
            except OSError:
                return
            if not piece:
                return


@contextmanager
def proxied(port: int, *, delay: float = 0.0) -> Iterator[Proxy]:
    proxy = Proxy(port, delay=delay)
    try:
        yield proxy
    finally:
        proxy.close()
