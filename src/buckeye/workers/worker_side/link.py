"""Worker's end of the connection: one thread reads it, any thread may write."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable

from .frames import Frame, FrameError, decode, encode, receive_body


class Link:
    """Connection to Buckeye. If it breaks, `on_lost` is called."""

    def __init__(self, connection: socket.socket, on_lost: Callable[[], None]) -> None:
        self._connection = connection
        self._on_lost = on_lost
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
            os._exit(0)  # only the worker replies, not its forks
        try:
            with self._writing:
                self._connection.sendall(data)
        except OSError:
            self._on_lost()

    def _read(self, receive: Callable[[Frame], None]) -> None:
        with contextlib.suppress(OSError, FrameError):
            while True:
                receive(decode(receive_body(self._connection)))
        self._on_lost()

    def _close_in_child(self) -> None:
        self._connection.close()


def kill_process_group() -> None:
    """Kill this process and every process of its group."""
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
