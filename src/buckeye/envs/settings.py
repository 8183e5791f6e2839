"""Settings for the execution of environments, in this process or in workers."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

PLACEMENT_VARIABLE = "BUCKEYE_PLACED"
"""Environment variable with a JSON object: it maps each environment's name to its `nodes` and `address`.
"""
Isolation = Literal["auto", "none", "process"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSettings:
    """Settings of an environment's workers. All durations are in seconds.

    With `isolation` "none" the environment runs in this process, with "process" in workers. With "auto",
    Buckeye environments that can be imported run in this process. `python` is the interpreter of the workers.
    By default it is the interpreter of the installed environment, or `sys.executable`. `processes` is the
    number of workers. A worker and its children may use `max_memory_bytes` of memory, and write
    `max_output_bytes` per minute. `variables` are the environment variables that the worker may see, in
    addition to those it needs to run. `sampling` is passed to the environment (`temperature`, `max_tokens`),
    which may ignore it. If `log_dir` is set, workers write their output to files in it, named after
    `log_name`.
    """

    isolation: Isolation = "auto"
    python: Path | None = None
    processes: int = 1
    nodes: Sequence[tuple[str, int] | None] = ()
    """Addresses of worker hosts on other nodes; None is this host. Workers are distributed over them."""
    address: str = "127.0.0.1"
    """Address at which workers reach the policy, which is in this process."""
    max_memory_bytes: int | None = None
    max_output_bytes: int = 64 * 1024 * 1024
    variables: tuple[str, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_turns: int | None = None
    """Maximum model calls of a rollout. A further call gets no reply, and the stop reason is `max_turns`."""
    max_tokens: int | None = None
    """Maximum tokens sampled in a rollout, over all its calls."""
    rollout_timeout: float = 3600.0
    """A rollout that takes longer is cancelled and has no reward."""
    start_timeout: float = 60.0
    """Timeout for the first message of a started worker."""
    load_timeout: float = 900.0
    """Timeout for loading the environment, which may download its data."""
    tasks_timeout: float = 900.0
    """Timeout for listing the tasks of a split."""
    score_timeout: float = 600.0
    """Timeout for scoring a group."""
    cancel_timeout: float = 10.0
    """Timeout for a cancelled rollout to end; then the worker is replaced."""
    close_timeout: float = 5.0
    """Timeout for a worker to end on request; then it is killed."""
    heartbeat_timeout: float = 60.0
    """A worker without a message for this long is replaced."""
    max_failures: int = 5
    """Maximum number of consecutive workers that end before they finish a rollout. After that, rollouts fail
    during the pause before the next start.
    """
    log_dir: Path | None = None
    log_name: str = "environment"
    module: str | None = None
    """Module of an installed environment. None: the module that its id names."""
    adapter: Path | None = None
    """Python file that defines how the environment is run, in place of the bundled adapters."""


def read_placement(name: str) -> dict[str, Any]:
    """Return the settings `nodes` and `address` that a run assigned to an environment."""
    settings: dict[str, Any] = json.loads(os.environ.get(PLACEMENT_VARIABLE, "{}")).get(name, {})
    return settings


def with_variables(names: Sequence[str]) -> WorkerSettings:
    """Return worker settings with these variables. With variables, the environment runs in a worker."""
    return WorkerSettings(isolation="process" if names else "auto", variables=tuple(names))
