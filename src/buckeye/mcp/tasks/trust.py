"""Require the user's permission for the programs, URLs and variables of third-party tasks.

Local files and folders need no permission. For a hub dataset, Buckeye asks the user once, and stores a hash
of the programs, URLs, variables and archives that the tasks use. A changed program needs a new permission,
but a changed prompt does not.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from buckeye.base.disk import human_bytes
from buckeye.base.json_lines import printable
from buckeye.base.keys import home_folder, masked
from buckeye.base.storage import read_json, write_file
from buckeye.errors import ConfigError, UsageError
from buckeye.mcp.tasks.dataset import find_images, find_taskset, is_archive, read_splits
from buckeye.mcp.tasks.lock_file import LOCK_FILE, read_lock
from buckeye.mcp.tasks.task_schema import HttpServer, McpTask, StdioServer
from buckeye.mcp.tasks.variables import find_server_variables

TRUSTED_VARIABLE = "BUCKEYE_TRUSTED"
"""Variable with further allowed hashes, separated by commas. It passes permissions to other machines."""

_KEY_NAME = re.compile("auth|key|token|secret|passw|cookie", re.I)


class UntrustedError(UsageError):
    """The user has not yet allowed the resources of a hub dataset's tasks."""

    code = "BK-ENV-UNTRUSTED"


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskResources:
    """Resources that tasks use on this machine.

    `by_kind` has the sorted, distinct resources of each kind as text for people. `digest` is a hash of all
    servers, grader commands and archives.
    """

    by_kind: Mapping[str, tuple[str, ...]]
    digest: str

    def lines(self) -> list[str]:
        """Return one line for each kind of resource in use."""
        return [
            f"{kind}: {', '.join(map(printable, values))}" for kind, values in self.by_kind.items() if values
        ]


def collect_task_resources(tasks: Sequence[McpTask]) -> TaskResources:
    """Return the resources that tasks use. The texts have the names of variables, not their values."""
    servers = [server for task in tasks for server in task.mcp_config.values()]
    http = [server for server in servers if isinstance(server, HttpServer)]
    stdio = [server for server in servers if not isinstance(server, HttpServer)]
    configs = _unique(json.dumps(_dump_server(server), sort_keys=True) for server in servers)
    graders = [grader for task in tasks for grader in task.grade]
    states = [grader.state for grader in graders if grader.state is not None]
    commands = _unique(shlex.join(state.command) for state in states if state.command)
    archives = {Path(task.files) for task in tasks if task.files is not None and is_archive(task.files)}
    by_kind = {
        "programs": _unique((*map(_format_program, stdio), *commands)),
        "images": _unique(find_images(tasks)),
        "addresses": _unique(map(_format_address, http)),
        "variables": _unique(find_server_variables(tasks)),
        "files": _unique(f"{path.name[:12]} ({human_bytes(path.stat().st_size)})" for path in archives),
    }
    content = json.dumps((*configs, *commands, *sorted(path.name for path in archives)))
    return TaskResources(by_kind=by_kind, digest=hashlib.sha256(content.encode()).hexdigest())


def _dump_server(server: StdioServer | HttpServer) -> dict[str, object]:
    """Return a server as a dictionary. Omit `cwd` if it is not set, so that older permissions stay valid."""
    return server.model_dump(exclude={"cwd"} if getattr(server, "cwd", None) is None else None)


def _format_program(server: StdioServer) -> str:
    variables = [f"{name}={_mask_key(name, value)}" for name, value in sorted(server.env.items())]
    return shlex.join([*variables, server.command, *server.args])


def _format_address(server: HttpServer) -> str:
    headers = [f"{name}: {_mask_key(name, value)}" for name, value in sorted(server.headers.items())]
    return f"{server.url} ({', '.join(headers)})" if headers else server.url


def _mask_key(name: str, value: str) -> str:
    """Return the value of a header or variable for display. Mask the value if it is a key in plain text."""
    return masked(value) if _KEY_NAME.search(name) and "$" not in value else value


def read_taskset(name: str, *, check_trust: bool = True) -> tuple[list[McpTask], list[McpTask]]:
    """Return the training tasks and the held-out tasks of a taskset.

    Raises UsageError if the taskset is not found. With `check_trust`, raises UntrustedError if the user has
    not allowed the tasks of a hub dataset.
    """
    tasks, held_out = read_splits(find_taskset(name))
    if check_trust and is_third_party(name):
        uses = collect_task_resources([*tasks, *held_out])
        if uses.digest not in trusted_digests():
            lines = [f"the tasks of {name} are from a third party and not yet allowed; these tasks use:"]
            raise UntrustedError(
                "\n".join([*lines, *(f"  {line}" for line in uses.lines())]),
                hint=f"check the list, then allow these tasks: buckeye env trust {shlex.quote(name)}",
            )
    return tasks, held_out


def is_third_party(name: str) -> bool:
    """Return True for a hub dataset, unless the lock file in the current directory names this dataset."""
    if Path(os.path.expanduser(name)).exists():
        return False
    with suppress(OSError, ConfigError):
        own = read_lock(Path(LOCK_FILE)).primary_dataset
        return own is None or own.name != name
    return True


def trusted_digests() -> set[str]:
    """Return the hashes of all resources that the user has allowed."""
    digests = set(filter(None, os.environ.get(TRUSTED_VARIABLE, "").split(",")))
    with suppress(OSError, ValueError, AttributeError):
        digests |= set(read_json(_trust_file()).keys())
    return digests


def save_permission(name: str, uses: TaskResources) -> Path:
    """Store that the user allows the resources of a dataset. Return the path of the file."""
    path, permissions = _trust_file(), {}
    with suppress(OSError, ValueError):
        permissions = read_json(path)
    permissions = {**permissions, uses.digest: {"name": name, **uses.by_kind}}
    write_file(path, json.dumps(permissions, indent=1), mode=0o600)
    return path


def _trust_file() -> Path:
    return home_folder() / "trusted.json"


def _unique(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(texts)))


def ask_for_trust(dataset: str, *, yes: bool) -> None:
    """Ask the user to allow the resources of a hub dataset, and store the permission.

    Do nothing if they are already allowed. With `yes`, do not ask. Raises UsageError if the user refuses, or
    if stdin is not a terminal.
    """
    from buckeye.base.terminal import can_prompt, prompt_for_text

    if not is_third_party(dataset):
        return
    tasks, held_out = read_taskset(dataset, check_trust=False)
    uses = collect_task_resources([*tasks, *held_out])
    if uses.digest in trusted_digests():
        return
    print(f"The tasks of {dataset} are from a third party. They use:", file=sys.stderr)
    for line in uses.lines():
        print(f"  {line}", file=sys.stderr)
    if not yes:
        if not can_prompt(yes=False, as_json=False):
            raise UsageError(
                f"cannot ask for permission to use {dataset}: not a terminal",
                code="BK-CLI-CONFIRM",
                hint=f"allow it with: buckeye env trust {shlex.quote(dataset)} --yes",
            )
        if prompt_for_text("Allow them for all runs on this machine? Type yes").lower() != "yes":
            raise UsageError(f"{dataset} was not allowed; nothing was started", code="BK-ENV-UNTRUSTED")
    print(f"Allowed and saved in {save_permission(dataset, uses)}", file=sys.stderr)
