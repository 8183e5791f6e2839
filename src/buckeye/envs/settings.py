"""Settings of the worker processes that run environments."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

PLACEMENT_VARIABLE = "BUCKEYE_PLACED"
"""Environment variable with a JSON object that maps each environment's name to its `nodes` and `address`."""
Isolation = Literal["auto", "none", "process"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSettings:
    """Settings of an environment's workers. All durations are in seconds.

    With `isolation` "none", the environment runs in this process. With "process", it runs in workers. With
    "auto", it runs in this process if it is a Buckeye environment that this process can import.
    """

    isolation: Isolation = "auto"
    python: Path | None = None
    """Interpreter of the workers. None: the interpreter of the installed environment, or `sys.executable`."""
    processes: int = 1
    """Number of workers."""
    nodes: Sequence[tuple[str, int] | None] = ()
    """Addresses of the hosts that run the workers, in turn. An entry None means the current host."""
    address: str = "127.0.0.1"
    """Address of this process. Workers connect to this address when a rollout calls the policy."""
    max_memory_bytes: int | None = None
    """Maximum memory of a worker and its children together. None: no limit."""
    max_output_bytes: int = 64 * 1024 * 1024
    """Maximum output of a worker and its children per minute."""
    variables: tuple[str, ...] = ()
    """Environment variables that workers can read, in addition to the variables that every worker needs."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """`temperature` and `max_tokens` for environments that read these settings."""
    max_turns: int | None = None
    """Maximum model calls of a rollout. A further call gets no reply, and the stop reason is `max_turns`."""
    max_tokens: int | None = None
    """Maximum number of sampled tokens in all model calls of a rollout."""
    rollout_timeout: float = 3600.0
    """Timeout for a rollout. A rollout that exceeds it is cancelled and has no reward."""
    start_timeout: float = 60.0
    """Timeout for the first message of a started worker."""
    load_timeout: float = 900.0
    """Timeout for loading the environment, which may download its data."""
    tasks_timeout: float = 900.0
    """Timeout for listing the tasks of a split."""
    score_timeout: float = 600.0
    """Timeout for scoring a group."""
    cancel_timeout: float = 10.0
    """Timeout for the end of a cancelled rollout. After it, a new worker replaces the worker."""
    close_timeout: float = 5.0
    """Timeout for the exit of a worker at the end. After it, the worker is killed."""
    heartbeat_timeout: float = 60.0
    """Timeout for the next message of a worker. After it, a new worker replaces the worker."""
    max_failures: int = 5
    """Limit on consecutive workers that exit before any rollout ends.

    Buckeye pauses before it replaces such a worker. New rollouts wait for the end of the pause. If the limit
    is reached, they fail at once instead.
    """
    log_dir: Path | None = None
    """Folder for files with the output of workers. None: no files."""
    log_name: str = "environment"
    """Beginning of the names of the files in `log_dir`."""
    module: str | None = None
    """Module of an installed environment. None: use the module that the environment's id names."""
    adapter: Path | None = None
    """The user's Python file that connects the environment to Buckeye. None: an adapter of Buckeye."""


def read_placement(name: str) -> dict[str, Any]:
    """Return the settings `nodes` and `address` that the launcher assigned to an environment."""
    settings: dict[str, Any] = json.loads(os.environ.get(PLACEMENT_VARIABLE, "{}")).get(name, {})
    return settings


def with_variables(names: Sequence[str]) -> WorkerSettings:
    """Return worker settings. If `names` lists environment variables, the environment runs in workers."""
    return WorkerSettings(isolation="process" if names else "auto", variables=tuple(names))
