"""Tasks of others name programs, addresses and variables: nothing of it is used before the user allowed it.

What a file or a folder on this machine names is the user's own. A dataset of a hub is asked about once: what
is remembered is the hash of all that its tasks use, so that other prompts ask nobody again, and another
program does.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from buckeye.errors import ConfigError, UsageError
from buckeye.lines import printable
from buckeye.storage import read_json, write_file
from buckeye.tasks.dataset import find_taskset, images_of, read_splits
from buckeye.tasks.keys import home_folder
from buckeye.tasks.lock import LOCK_FILE, read_lock
from buckeye.tasks.models import HttpServer, McpTask
from buckeye.tasks.variables import names_in_servers

TRUSTED_VARIABLE = "BUCKEYE_TRUSTED"
"""Hashes that count as allowed too, by commas: what was allowed at home counts on a rented machine."""


class UntrustedError(UsageError):
    """The tasks of a hub were not allowed yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Uses:
    """What tasks make this machine do: each once, sorted."""

    programs: tuple[str, ...]
    images: tuple[str, ...]
    addresses: tuple[str, ...]
    variables: tuple[str, ...]

    @property
    def digest(self) -> str:
        """The hash of all of it."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def lines(self) -> list[str]:
        """For people: a line for each kind that there is."""
        named = {name: [printable(one) for one in found] for name, found in asdict(self).items() if found}
        return [f"{name}: {', '.join(found)}" for name, found in named.items()]


def uses_of(tasks: Sequence[McpTask]) -> Uses:
    """What tasks use. Variables stand by their names, as they are written."""
    servers = [server for task in tasks for server in task.mcp_config.values()]
    http = [server for server in servers if isinstance(server, HttpServer)]
    stdio = [server for server in servers if not isinstance(server, HttpServer)]
    return Uses(
        programs=_once(shlex.join([server.command, *server.args]) for server in stdio),
        images=_once(images_of(tasks)),
        addresses=_once(server.url for server in http),
        variables=_once(names_in_servers(tasks)),
    )


def read_taskset(name: str, *, checked: bool = True) -> tuple[list[McpTask], list[McpTask]]:
    """The tasks to train on and those that are held out, of what `name` means. Raises UsageError if there are
    none, and UntrustedError if they are a hub's and, being `checked`, were not allowed."""
    tasks, held_out = read_splits(find_taskset(name))
    if checked and is_of_others(name):
        uses = uses_of([*tasks, *held_out])
        if uses.digest not in trusted_digests():
            listed = "\n".join(f"  {line}" for line in uses.lines())
            raise UntrustedError(
                f"the tasks of {name} are somebody else's, and were not allowed to use what they name:\n"
                f"{listed}\n"
                f"Look at it, and allow it once: buckeye env trust {shlex.quote(name)}"
            )
    return tasks, held_out


def is_of_others(name: str) -> bool:
    """Whether tasks come from a hub, and not as the dataset that belongs to the project where we are."""
    if Path(name).expanduser().exists():
        return False
    with suppress(OSError, ConfigError):
        own = read_lock(Path(LOCK_FILE)).primary_dataset
        return own is None or own.name != name
    return True


def trusted_digests() -> set[str]:
    """The hashes of what the user has allowed."""
    given = {one for one in os.environ.get(TRUSTED_VARIABLE, "").split(",") if one}
    with suppress(OSError, ValueError, AttributeError):
        given |= set(read_json(_file()).keys())
    return given


def allow(name: str, uses: Uses) -> Path:
    """Remember that the user has allowed what the tasks of a dataset use. Returns the file."""
    known = {}
    with suppress(OSError, ValueError):
        known = read_json(_file())
    write_file(
        _file(), json.dumps({**known, uses.digest: {"name": name, **asdict(uses)}}, indent=1), mode=0o600
    )
    return _file()


def _file() -> Path:
    return home_folder() / "trusted.json"


def _once(found: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(found)))
