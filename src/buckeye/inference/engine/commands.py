"""Queue through which other threads send functions to the engine's thread."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

from buckeye.inference.engine.weights import PartialUpdateError

T = TypeVar("T")


class CommandQueue:
    """Queue of functions. Any thread adds functions, and one thread runs them in order (`run_pending`)."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def put(self, command: Callable[[], None]) -> None:
        """Queue `command`, which must not raise. Safe in a signal handler."""
        self._queue.put(command)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Queue `function`. Return a future that gets its result or exception."""
        done: Future[T] = Future()

        def command() -> None:
            try:
                result = function()
            except Exception as error:
                done.set_exception(error)
                if isinstance(error, torch.AcceleratorError | PartialUpdateError):
                    raise  # after these errors the process must end
            else:
                done.set_result(result)

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
