"""Files that ask the launcher to restart an inference server, for example after wrong results.

The orchestrator writes them to the run directory. If the run has no launcher, no process reads them.
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
    """URL of the server to restart (`http://host:port`), and the reason."""

    url: str
    reason: str


def request_restart(output_dir: Path, url: str, reason: str) -> None:
    """Write a restart request for a server. It replaces an earlier request for this server."""
    path = output_dir / RESTART_FOLDER / (re.sub(r"\W+", "_", url) + ".json")
    storage.write_file(path, json.dumps({"url": url, "reason": reason}))


def take_restart_requests(output_dir: Path) -> list[RestartRequest]:
    """Return and delete all restart requests. Raise `TransportError` if a request cannot be read."""
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
