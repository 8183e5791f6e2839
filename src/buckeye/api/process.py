"""Process of a run that Python started: print its output, wait for it, and stop it when the caller ends.

`python -m buckeye.api.process OWNER_PID rl ...` runs a command. When the process OWNER_PID ends, the command
stops as after Ctrl-C.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from buckeye.base.process import EXIT_INTERRUPTED, PYTHON
from buckeye.errors import BuckeyeError, RunError, UsageError

log = logging.getLogger("buckeye.api")

_POLL_SECONDS = 0.5
_OUTPUT_SECONDS = 10.0  # for the last lines; a stray child of the run may hold its output open
_MAX_ERROR_LINES = 100
_STEP = re.compile(r"Step (\d+)/(\d+) \| (.*)")
_LOG_LINE = re.compile(r"\d\d:\d\d:\d\d ")
_CODE = re.compile(r"^[ |]*more: buckeye explain (\S+)\n?", re.MULTILINE)
_USAGE = 2


class RunProcess:
    """Child process that executes a run.

    The calling process prints the output of the child, and shows the steps of the run as a progress bar.
    """

    def __init__(self, argv: Sequence[str], *, folder: Path, variables: Mapping[str, str]) -> None:
        command = [*PYTHON, "-m", __name__, str(os.getpid()), *argv]
        self._process = subprocess.Popen(  # noqa: S603  argv as a list, without a shell
            command,
            cwd=folder,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches only this process, which forwards it
        )
        self._error_lines: list[str] = []
        """Lines from `error: ` on. They end the output of a failed process, and `wait` raises them."""
        self._is_awaited = False
        self._bar: Any = None
        self._printer = threading.Thread(target=self._print, name="buckeye-output", daemon=True)
        self._printer.start()

    @property
    def is_running(self) -> bool:
        """True until the process has ended."""
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def stop(self) -> None:
        """Request a stop of the run, and return at once."""
        self._process.terminate()

    def wait(self) -> None:
        """Wait for the end of the run.

        Ctrl-C stops the run: the trainer finishes its step and writes a checkpoint. A second Ctrl-C stops the
        run at once. Raises KeyboardInterrupt after Ctrl-C, and UsageError or RunError if the run failed.
        """
        interrupted, self._is_awaited = False, True
        while self.is_running:
            try:
                self._process.wait()
            except KeyboardInterrupt:
                interrupted = True
                self._process.send_signal(signal.SIGINT)
        if not interrupted and (error := self.error) is not None:
            raise error
        self._printer.join(_OUTPUT_SECONDS)
        self._show_all(self._error_lines)
        if interrupted:
            raise KeyboardInterrupt

    @property
    def error(self) -> BuckeyeError | None:
        """Error that ended the output, or None if the process runs or has not failed."""
        if self.is_running or self._process.returncode in (0, EXIT_INTERRUPTED, -signal.SIGTERM):
            return None
        self._printer.join(_OUTPUT_SECONDS)
        text = "\n".join(self._error_lines)
        code = _CODE.search(text)
        message = _CODE.sub("", text).removeprefix("error: ").strip()
        kind = UsageError if self._process.returncode == _USAGE else RunError
        message = message or f"the run ended with exit code {self._process.returncode}"
        return kind(message, code=code[1] if code else "BK-RUN")

    def _print(self) -> None:
        """Print the output of the process; in a terminal or a notebook, show its steps as a bar."""
        assert self._process.stdout is not None
        for line in map(str.rstrip, self._process.stdout):
            is_logged = _LOG_LINE.match(line) or _STEP.match(line)
            is_error = line.startswith("error: ") or (self._error_lines and not is_logged)
            if is_error and len(self._error_lines) < _MAX_ERROR_LINES:
                self._error_lines.append(line)
                continue
            self._show_all([*self._error_lines, line])  # text of a rollout may look like an error
            self._error_lines.clear()
        if self._bar is not None:
            self._bar.close()
        if not self._is_awaited:
            self._show_all(self._error_lines)

    def _show_all(self, lines: Sequence[str]) -> None:
        # If the output is closed, continue to read from the run. Otherwise its pipe fills up and blocks it.
        with suppress(OSError, ValueError):
            for line in lines:
                self._show(line)

    def _show(self, line: str) -> None:
        step = _STEP.match(line)
        if step is None or not _is_interactive():
            (print if self._bar is None else self._bar.write)(line)
            return
        self._bar = self._bar or _make_bar(int(step[2]))
        self._bar.set_postfix_str(step[3], refresh=False)
        self._bar.update(int(step[1]) - self._bar.n)


def _is_interactive() -> bool:
    """Return True in a terminal, and in a notebook."""
    return sys.stdout.isatty() or "ipykernel" in sys.modules


def _make_bar(steps: int) -> Any:
    from tqdm.auto import tqdm

    return tqdm(total=steps, unit="step", mininterval=0, file=sys.stdout)


def _stop_with(owner: int) -> None:
    """Wait until the parent process `owner` has ended. Then stop this process, as Ctrl-C would."""
    while os.getppid() == owner:
        time.sleep(_POLL_SECONDS)
    with suppress(Exception):  # the output of this process may be closed
        log.warning(
            "The Python process that started this run has ended: the run stops with a checkpoint. "
            "To continue: buckeye.open_run(RUN).resume(...) in Python"
        )
    os.kill(os.getpid(), signal.SIGTERM)  # SIGINT may be ignored, as in a script in the background


def main() -> None:
    """Run the command in `sys.argv`, and stop it when the owner ends."""
    from buckeye.cli import main as cli

    owner = int(sys.argv.pop(1))
    threading.Thread(target=_stop_with, args=(owner,), name="buckeye-owner", daemon=True).start()
    sys.argv[0] = "buckeye"
    cli.main()


if __name__ == "__main__":
    main()
