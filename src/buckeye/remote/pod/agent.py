"""Answer requests about a job: `python -m buckeye.remote.pod.agent JOB`, one JSON object per line.

Each request counts as a heartbeat of the local process that supervises the job. The requests are:

- `{"ask": "look"}`: return the state of the job, and a list of its files.
- `{"ask": "read", "path", "offset", "length"}`: return bytes of a file. `path` is relative to the output
  directory, or `@log` for the output of the job.
- `{"ask": "stop"}`: send SIGTERM to the job.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from buckeye.base.storage import is_locked
from buckeye.remote.pod.receive import send
from buckeye.remote.pod.wrapper import read_job

JOB_LOG = "@log"
_NOT_LISTED = ("batches", ".lock")  # useless on other machines


class Agent:
    """Answers requests about one job."""

    def __init__(self, folder: Path) -> None:
        job = read_job(folder)
        self._folder = folder
        self._output = Path(job["cwd"]) / job["output_dir"]

    def answer(self, question: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        """Return the JSON object and the bytes of a response. Raises OSError for an unreadable file."""
        (self._folder / "heartbeat").touch()
        if question["ask"] == "look":
            return self._look(), b""
        if question["ask"] == "stop":
            if is_locked(self._folder / "lock"):  # without the lock, another process may have this pid
                os.kill(int((self._folder / "pid").read_text()), signal.SIGTERM)
            return {}, b""
        if question["ask"] == "read":
            return {}, self._read(question["path"], int(question["offset"]), int(question["length"]))
        raise ValueError(f"{question['ask']!r} is not a known request")

    def _look(self) -> dict[str, Any]:
        rc = self._folder / "rc"
        held = is_locked(self._folder / "lock")  # check first: a job writes rc, then releases the lock
        code = int(rc.read_text()) if rc.exists() else None
        log = self._folder / "log"
        causes = [self._folder / name for name in ("dead_man", "wrapper.log")]
        return {
            "running": held and code is None,
            "started": (self._folder / "pid").exists(),
            "code": code,
            "ended_by": next(
                (path.read_text(errors="replace")[-1000:] for path in causes if path.exists()), None
            ),
            "log_size": log.stat().st_size if log.exists() else 0,
            "files": list(self._files(self._output, "")),
        }

    def _read(self, path: str, offset: int, length: int) -> bytes:
        if path.startswith("/") or ".." in path.split("/"):
            raise ValueError(f"{path!r} is outside of the run")
        place = self._folder / "log" if path == JOB_LOG else self._output / path
        with place.open("rb") as file:
            file.seek(offset)
            return file.read(length)

    def _files(self, folder: Path, prefix: str) -> Iterator[list[Any]]:
        """Yield `[path, size, mtime in ns, link target or None]` of every complete file."""
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except FileNotFoundError:
            return
        for entry in entries:
            name = prefix + entry.name
            if name in _NOT_LISTED or (entry.name.startswith(".") and ".tmp-" in entry.name):
                continue
            try:
                if entry.is_symlink():
                    yield [name, 0, 0, os.readlink(entry.path)]
                elif entry.is_dir():
                    yield from self._files(Path(entry.path), f"{name}/")
                elif entry.is_file():
                    status = entry.stat()
                    yield [name, status.st_size, status.st_mtime_ns, None]
            except FileNotFoundError:
                continue  # the job has just deleted the file


def serve(agent: Agent, questions: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until the input ends."""
    for line in questions:
        try:
            said, content = agent.answer(json.loads(line))
        except (OSError, ValueError, KeyError) as error:
            said, content = {"error": f"{type(error).__name__}: {error}"}, b""
        send(answers, said, content)


if __name__ == "__main__":
    serve(Agent(Path(sys.argv[1])), sys.stdin.buffer, sys.stdout.buffer)
