"""Queue through which other threads send functions to the engine's thread."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future

import torch

from buckeye.inference.engine.weights import PartialUpdateError


class CommandQueue:
    """Queue of functions. Any thread adds functions, and one thread runs them in order (`run_pending`)."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def put(self, command: Callable[[], None]) -> None:
        """Queue `command`, which must not raise. Safe in a signal handler."""
        self._queue.put(command)

    def call(self, function: Callable[[], None]) -> Future[None]:
        """Queue `function`. Return a future that completes when `function` has run, or gets its exception."""
        done: Future[None] = Future()

        def command() -> None:
            try:
                function()
            except Exception as error:
                done.set_exception(error)
                if isinstance(error, torch.AcceleratorError | PartialUpdateError):
                    raise  # after these errors the process must end
            else:
                done.set_result(None)

        self._queue.put(command)
        return done

    def run_pending(self, *, block: bool) -> None:
        """Run all functions in the queue. With `block`, wait for a function if the queue is empty."""
        if block:
            self._queue.get()()
        while True:
            try:
                command = self._queue.get_nowait()
            except queue.Empty:
                return
            command()
