"""Output to a terminal or a pipe that may be closed."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from typing import Any, TextIO

from buckeye.base.json_lines import is_file

log = logging.getLogger(__name__)


class Console:
    """Text stream that becomes silent once its reader is gone. Otherwise it behaves as the wrapped stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._be_silent(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._be_silent(error)

    def _be_silent(self, error: OSError) -> None:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, self._stream.fileno())
        os.close(silence)
        with suppress(OSError):
            self._stream.flush()  # discards the unwritten rest
        log.warning("stdout is closed (%s): continuing without console output", error.strerror)


def ignore_closed_output() -> None:
    """Keep this process running when the terminal or pipe of its output is closed.

    A replaced stdout or stderr stays unchanged.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and stream is getattr(sys, f"__{name}__") and not is_file(stream.fileno()):
            setattr(sys, name, Console(stream))
