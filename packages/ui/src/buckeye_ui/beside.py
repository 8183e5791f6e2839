"""`rl ... --watch`: a run with `rl watch` in front of it, in one terminal. The run is a child that prints
into a file; the terminal is the watcher's."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from types import FrameType
from typing import IO, ClassVar

from textual.binding import Binding, BindingType

from buckeye.config.rl import RLConfig
from buckeye.launch.resume import arguments_of
from buckeye_ui.sources import OpenRun
from buckeye_ui.watch import Watch

_LOOK_SECONDS = 0.2
_LAST_BYTES = 4_000  # of what the run has printed meanwhile
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class WatchBeside(Watch):
    """Ends when the run does; Ctrl-C ends that, as it would without the watcher."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+c", "interrupt", "End the run", priority=True),
        Binding("q", "quit", "Watch no more"),
    ]

    def __init__(self, run: OpenRun, child: subprocess.Popen[bytes]) -> None:
        super().__init__(run)
        self._child = child

    def on_mount(self) -> None:
        super().on_mount()
        self.set_interval(_LOOK_SECONDS, self._look)

    def _look(self) -> None:
        if self._child.poll() is not None:
            self.exit()

    def action_interrupt(self) -> None:
        self._child.send_signal(signal.SIGINT)
        self.notify(
            "The run ends: the trainer finishes its step and checkpoints. Ctrl-C again ends it at once."
        )


def start_beside(config: RLConfig, command: Sequence[str]) -> int:
    """Start the run that `command` starts, watch it until either ends, and return its exit code."""
    argv = [sys.executable, "-m", "buckeye", "rl", *arguments_of(command)]
    with tempfile.TemporaryFile() as printed:
        child = subprocess.Popen(  # noqa: S603  a list of words, without a shell
            argv, stdin=subprocess.DEVNULL, stdout=printed, stderr=subprocess.STDOUT, process_group=0
        )

        def pass_on(number: int, _: FrameType | None) -> None:
            child.send_signal(number)

        before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
        try:
            WatchBeside(OpenRun(config.output_dir.absolute().name, config.output_dir), child).run()
            return _followed(child, printed)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _followed(child: subprocess.Popen[bytes], printed: IO[bytes]) -> int:
    """Print what the run printed last, and what it prints until it ends."""
    at = max(0, printed.seek(0, 2) - _LAST_BYTES)
    ended = False
    while not ended:
        ended = child.poll() is not None
        printed.seek(at)
        new = printed.read()
        at += len(new)
        sys.stdout.write(new.decode(errors="replace"))
        sys.stdout.flush()
        time.sleep(0 if ended else _LOOK_SECONDS)
    return max(1, child.returncode) if child.returncode < 0 else child.returncode
