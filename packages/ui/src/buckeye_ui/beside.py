"""`rl ... --watch`: a run with `rl watch` in front of it, in one terminal. The run is a child that prints
into a file; the terminal is the watcher's."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from types import FrameType
from typing import IO, ClassVar

from textual.binding import Binding, BindingType

from buckeye.base.process import ChildProcess
from buckeye.config.rl import RLConfig
from buckeye.launch.resume import arguments_of
from buckeye_ui.sources import OpenRun
from buckeye_ui.watch import Watch

_LOOK_SECONDS = 0.2
_LAST_BYTES = 4_000  # of what the run has printed meanwhile
_MOST_AT_ONCE = 65_536
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class WatchBeside(Watch):
    """Ends when the run does; Ctrl-C ends that, as it would without the watcher."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+c", "interrupt", "End the run", priority=True),
        Binding("q", "quit", "Watch no more"),
    ]

    def __init__(self, run: OpenRun, child: ChildProcess) -> None:
        super().__init__(run)
        self._child = child

    def on_mount(self) -> None:
        super().on_mount()
        self.set_interval(_LOOK_SECONDS, self._look)

    def _look(self) -> None:
        if self._child.returncode is not None:
            self.exit()

    def action_interrupt(self) -> None:
        self._child.signal(signal.SIGINT, session=False)
        self.notify(
            "The run ends: the trainer finishes its step and checkpoints. Ctrl-C again ends it at once."
        )


def start_beside(config: RLConfig, command: Sequence[str]) -> int:
    """Start the run that `command` starts, watch it until either ends, and return its exit code."""
    argv = [sys.executable, "-m", "buckeye", "rl", *arguments_of(command)]
    with tempfile.TemporaryFile() as printed:
        child = ChildProcess(argv, stdout=printed, stderr=printed, guarded=True)

        def pass_on(number: int, _: FrameType | None) -> None:
            child.signal(number, session=False)

        before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
        try:
            WatchBeside(OpenRun(config.output_dir.absolute().name, config.output_dir), child).run()
            return _followed(child, printed)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _followed(child: ChildProcess, printed: IO[bytes]) -> int:
    """Print what the run printed last, and what it prints until it ends."""
    at = max(0, os.fstat(printed.fileno()).st_size - _LAST_BYTES)
    while True:
        code = child.returncode
        new = os.pread(printed.fileno(), _MOST_AT_ONCE, at)
        at += len(new)
        sys.stdout.buffer.write(new)
        sys.stdout.buffer.flush()
        if code is not None and not new:
            return code if code >= 0 else 1  # below 0 it was killed
        if not new:
            time.sleep(_LOOK_SECONDS)
