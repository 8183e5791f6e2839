"""The one way for other threads to talk to the engine's: a queue of functions."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future

import torch

from buckeye.inference.engine.weights import HalfReplacedError


class CommandQueue:
    """Functions from any thread, run in their order by the one thread that calls `obey`."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def put(self, command: Callable[[], None]) -> None:
        """Have `command` run. It must not raise. May be called from a signal handler."""
        self._queue.put(command)

    def call(self, function: Callable[[], None]) -> Future[None]:
        """Have `function` run; the future is done, or has its exception, when it has."""
        done: Future[None] = Future()

        def command() -> None:
            try:
                function()
            except Exception as error:
                done.set_exception(error)
                if isinstance(error, torch.AcceleratorError | HalfReplacedError):
                    raise  # nothing can be computed in this process from now on
            else:
                done.set_result(None)

        self._queue.put(command)
        return done

    def obey(self, *, block: bool) -> None:
        """Run what is in the queue; with `block`, wait for something if it is empty."""
        if block:
            self._queue.get()()
        while True:
            try:
                command = self._queue.get_nowait()
            except queue.Empty:
                return
            command()
