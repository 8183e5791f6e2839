"""Worker's end of the connection: one thread reads it, any thread may write."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable

from .frames import Frame, decode, encode, receive_body


class Link:
    """Connection to Buckeye. If it breaks, this process and its children are killed."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._writing = threading.Lock()
        self._owner = os.getpid()
        os.register_at_fork(after_in_child=self._close_in_child)

    def listen(self, receive: Callable[[Frame], None]) -> None:
        """Pass every message to `receive`, in a separate thread."""
        threading.Thread(target=self._read, args=(receive,), name="buckeye", daemon=True).start()

    def send(self, frame: Frame) -> None:
        """Send one message. Raises FrameError if it cannot be encoded."""
        self.send_encoded(encode(frame))

    def send_encoded(self, data: bytes) -> None:
        """Send an encoded message."""
        if os.getpid() != self._owner:
            os._exit(0)  # a forked copy must not reply; its parent does
        try:
            with self._writing:
                self._connection.sendall(data)
        except OSError:
            kill_process_group()

    def _read(self, receive: Callable[[Frame], None]) -> None:
        try:
            while True:
                receive(decode(receive_body(self._connection)))
        finally:
            kill_process_group()

    def _close_in_child(self) -> None:
        self._connection.close()


def kill_process_group() -> None:
    """Kill this process and every process of its group."""
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
