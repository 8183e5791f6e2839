"""Requests of the orchestrator to the launcher, in the run directory, to restart an inference server that
returns wrong results. Without a launcher, nothing reads them."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from buckeye.base import storage
from buckeye.errors import TransportError

RESTART_FOLDER = "restart"


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartRequest:
    """A server, as `http://host:port`, and what is wrong with it."""

    url: str
    reason: str


def request_restart(output_dir: Path, url: str, reason: str) -> None:
    """Leave a request for the launcher. A later one for the same server replaces it."""
    path = output_dir / RESTART_FOLDER / (re.sub(r"\W+", "_", url) + ".json")
    storage.write_file(path, json.dumps(asdict(RestartRequest(url=url, reason=reason))))


def take_restart_requests(output_dir: Path) -> list[RestartRequest]:
    """All requests there are; each is taken once. Raises TransportError for one that cannot be read."""
    taken = []
    for path in sorted((output_dir / RESTART_FOLDER).glob("*.json")):
        try:
            taken.append(msgspec.convert(storage.read_json(path), RestartRequest))
        except (OSError, ValueError, TypeError) as error:
            raise TransportError(f"{path} cannot be read ({error}); delete it.") from error
        path.unlink()
    return taken
