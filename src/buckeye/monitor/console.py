"""Output to a terminal or pipe that may be closed, or to a file on a disk that may be full."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from typing import Any, TextIO

from buckeye.base.json_lines import LineStream, is_file

log = logging.getLogger(__name__)


class Console:
    """Wrapper of a text stream. After the reader has closed the stream, it drops all text."""

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


def protect_output() -> None:
    """Keep this process running when its stdout or stderr is closed, or is a file on a full disk.

    Output to a closed terminal or pipe is dropped. A file gets only whole lines, and no lines while its disk
    is full. If a caller has replaced `sys.stdout` or `sys.stderr`, the replacement stays unchanged.
    """
    files: dict[tuple[int, int], LineStream] = {}  # one stream per file: stderr and stdout often share one
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or stream is not getattr(sys, f"__{name}__"):
            continue
        if is_file(stream.fileno()):
            stream.flush()
            file = os.fstat(stream.fileno())
            setattr(sys, name, files.setdefault((file.st_dev, file.st_ino), LineStream(stream.fileno())))
        else:
            setattr(sys, name, Console(stream))
