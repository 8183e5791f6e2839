"""What launcher and orchestrator tell each other about the inference servers of a run, in its directory:
which there are, and which one runs and is not right, so that the launcher should restart it.

Without a launcher nobody says the one or reads the other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from buckeye.base import storage
from buckeye.errors import TransportError

RESTART_FOLDER = "restart"
SERVERS_FILE = "servers.json"
"""The addresses of the servers, as a list."""


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


def write_servers(output_dir: Path, urls: Sequence[str]) -> None:
    """Say which servers the run has now."""
    storage.write_file(output_dir / SERVERS_FILE, json.dumps(list(urls)))


def read_servers(output_dir: Path) -> list[str] | None:
    """The servers that the run has now; None if nobody has said. Raises TransportError for a file that is
    not right."""
    path = output_dir / SERVERS_FILE
    try:
        return msgspec.convert(storage.read_json(path), list[str])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise TransportError(f"{path} cannot be read ({error}); delete it.") from error
