"""Tasks of others name programs, addresses and variables: nothing of it is used before the user allowed it.

What a file or a folder on this machine names is the user's own. A dataset of a hub is asked about once: what
is remembered is the hash of all that its tasks use, so that other prompts ask nobody again, and another
program does.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from buckeye.base.disk import human_bytes
from buckeye.base.json_lines import printable
from buckeye.base.keys import home_folder, masked
from buckeye.base.storage import read_json, write_file
from buckeye.errors import ConfigError, UsageError
from buckeye.mcp.tasks.dataset import find_taskset, images_of, is_archive, read_splits
from buckeye.mcp.tasks.lock import LOCK_FILE, read_lock
from buckeye.mcp.tasks.task_schema import HttpServer, McpTask, StdioServer
from buckeye.mcp.tasks.variables import names_in_servers

TRUSTED_VARIABLE = "BUCKEYE_TRUSTED"
"""Hashes that count as allowed too, by commas: what was allowed at home counts on a rented machine."""

_NAME_OF_A_KEY = re.compile("auth|key|token|secret|passw|cookie", re.I)


class UntrustedError(UsageError):
    """The tasks of a hub were not allowed yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Uses:
    """What tasks make this machine do: each once, sorted, as people read it."""

    programs: tuple[str, ...]
    """With the variables that are set for them, as a shell would be told."""
    images: tuple[str, ...]
    addresses: tuple[str, ...]
    """With the headers that are sent there."""
    variables: tuple[str, ...]
    files: tuple[str, ...]
    """Archives of the dataset, with which rollouts begin, by the first digits of their hashes."""
    digest: str
    """The hash of the servers of the tasks, whole, of what grades them and of their files: what goes where
    counts, too."""

    def lines(self) -> list[str]:
        """For people: a line for each kind that there is."""
        found = {name: [printable(one) for one in said] for name, said in self.named().items() if said}
        return [f"{name}: {', '.join(said)}" for name, said in found.items()]

    def named(self) -> dict[str, tuple[str, ...]]:
        """What there is of each kind."""
        return {
            kind: getattr(self, kind) for kind in ("programs", "images", "addresses", "variables", "files")
        }


def uses_of(tasks: Sequence[McpTask]) -> Uses:
    """What tasks use. Variables stand by their names, as they are written."""
    servers = [server for task in tasks for server in task.mcp_config.values()]
    http = [server for server in servers if isinstance(server, HttpServer)]
    stdio = [server for server in servers if not isinstance(server, HttpServer)]
    written = _once(json.dumps(_as_written(server), sort_keys=True) for server in servers)
    graders = [grader for task in tasks for grader in task.graders]
    commands = _once(shlex.join(one.state.command) for one in graders if one.state and one.state.command)
    archives = {Path(task.files) for task in tasks if task.files is not None and is_archive(task.files)}
    return Uses(
        programs=_once((*map(_program, stdio), *commands)),
        images=_once(images_of(tasks)),
        addresses=_once(map(_address, http)),
        variables=_once(names_in_servers(tasks)),
        files=_once(f"{path.name[:12]} ({human_bytes(path.stat().st_size)})" for path in archives),
        digest=hashlib.sha256(
            json.dumps((*written, *commands, *sorted(path.name for path in archives))).encode()
        ).hexdigest(),
    )


def _as_written(server: StdioServer | HttpServer) -> dict[str, object]:
    """All of a server; what was allowed before there was a `cwd` is allowed still."""
    return server.model_dump(exclude={"cwd"} if getattr(server, "cwd", None) is None else None)


def _program(server: StdioServer) -> str:
    variables = [f"{name}={_shown(name, value)}" for name, value in sorted(server.env.items())]
    return shlex.join([*variables, server.command, *server.args])


def _address(server: HttpServer) -> str:
    headers = [f"{name}: {_shown(name, value)}" for name, value in sorted(server.headers.items())]
    return f"{server.url} ({', '.join(headers)})" if headers else server.url


def _shown(name: str, value: str) -> str:
    """A value, unless it is a key itself and not the name of one."""
    return masked(value) if _NAME_OF_A_KEY.search(name) and "$" not in value else value


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
    known = {**known, uses.digest: {"name": name, **uses.named()}}
    write_file(_file(), json.dumps(known, indent=1), mode=0o600)
    return _file()


def _file() -> Path:
    return home_folder() / "trusted.json"


def _once(found: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(found)))


def ask_for_trust(dataset: str, *, yes: bool) -> None:
    """Have the user allow what the tasks of a hub use, unless that was done. Raises UsageError if it is not
    allowed, or if nobody can be asked."""
    from buckeye.base.terminal import ask_text, can_ask

    if not is_of_others(dataset):
        return
    tasks, held_out = read_taskset(dataset, checked=False)
    uses = uses_of([*tasks, *held_out])
    if uses.digest in trusted_digests():
        return
    print(f"The tasks of {dataset} are somebody else's. They use:", file=sys.stderr)
    for line in uses.lines():
        print(f"  {line}", file=sys.stderr)
    if not yes:
        if not can_ask(yes=False, as_json=False):
            raise UsageError(
                f"nobody can be asked whether that is allowed. Say so: buckeye env trust {dataset} --yes"
            )
        if ask_text("Allow it, here and for all runs? Type yes").lower() != "yes":
            raise UsageError(f"{dataset} was not allowed; nothing was started.")
    print(f"Allowed, and noted in {allow(dataset, uses)}", file=sys.stderr)
