"""Requests of the orchestrator to the launcher to restart an inference server with wrong results.

They are in the run directory. Without a launcher they are never read.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import msgspec

from buckeye.base import storage
from buckeye.errors import TransportError

RESTART_FOLDER = "restart"


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartRequest:
    """URL of a server (`http://host:port`), and its problem."""

    url: str
    reason: str


def request_restart(output_dir: Path, url: str, reason: str) -> None:
    """Write a request for the launcher. A later one for the same server replaces it."""
    path = output_dir / RESTART_FOLDER / (re.sub(r"\W+", "_", url) + ".json")
    storage.write_file(path, json.dumps({"url": url, "reason": reason}))


def take_restart_requests(output_dir: Path) -> list[RestartRequest]:
    """Return and remove all requests. Raise `TransportError` for an unreadable request."""
    requests = []
    for path in sorted((output_dir / RESTART_FOLDER).glob("*.json")):
        try:
            requests.append(msgspec.convert(storage.read_json(path), RestartRequest))
        except (OSError, ValueError, TypeError) as error:
            raise TransportError(
                f"the restart request {path} cannot be read: {error}",
                code="BK-FILE-FORMAT",
                hint="delete the file",
            ) from error
        path.unlink()
    return requests
