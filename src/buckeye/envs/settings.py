"""How an environment is run in processes of its own."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

PLACED_VARIABLE = "BUCKEYE_PLACED"
"""What a run says of environments whose workers are on its nodes, as JSON: settings by their names."""
Isolation = Literal["auto", "none", "process"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSettings:
    """All waits are in seconds.

    `isolation`: "none" plays in this process, "process" never does, "auto" only environments written for
    Buckeye that can be imported here. `python` is the interpreter; None is that of the installed environment,
    else this one. `processes` share the rollouts. A worker and its children may have `max_memory_bytes` of
    memory, and write `max_output_bytes` within a minute. `variables` names environment variables that the
    worker may see, beside those it needs to run. `sampling` is told to the environment (`temperature`,
    `max_tokens`), which may not heed it. The output goes to `log_dir`, if there is one, into files called
    after `log_name`.
    """

    isolation: Isolation = "auto"
    python: Path | None = None
    processes: int = 1
    nodes: Sequence[tuple[str, int] | None] = ()
    """Where on other nodes a host of workers listens; None is this host. Workers are spread over them."""
    address: str = "127.0.0.1"
    """Where workers reach the policy, which is in this process."""
    max_memory_bytes: int | None = None
    max_output_bytes: int = 64 * 1024 * 1024
    variables: tuple[str, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_turns: int | None = None
    """Most model calls of a rollout; the one after gets no answer and the rollout ends as `max_turns`."""
    max_tokens: int | None = None
    """Most tokens that are sampled in a rollout, over all its calls."""
    rollout_timeout: float = 3600.0
    """A rollout that takes longer is cancelled and has no reward."""
    start_timeout: float = 60.0
    """Until the interpreter answers."""
    load_timeout: float = 900.0
    """Until the environment is loaded: it may have to fetch its data."""
    tasks_timeout: float = 900.0
    """Until the tasks of a split have come."""
    score_timeout: float = 600.0
    """Until a group is scored."""
    cancel_timeout: float = 10.0
    """Until a cancelled rollout has ended; then the worker is replaced."""
    close_timeout: float = 5.0
    """Until a worker that is asked to end has ended; then it is killed."""
    heartbeat_timeout: float = 60.0
    """A worker that is silent for so long is replaced."""
    max_failures: int = 5
    """After so many workers in a row that ended before any rollout did, the next is started only after a
    pause."""
    log_dir: Path | None = None
    log_name: str = "environment"
    module: str | None = None
    """The module of an installed environment, where that does not follow from its id."""
    adapter: Path | None = None
    """A Python file that says how the environment is played, instead of the adapters that come along."""


def placed(name: str) -> dict[str, Any]:
    """The settings `nodes` and `address` of an environment whose workers a run has placed on its nodes."""
    found: dict[str, Any] = json.loads(os.environ.get(PLACED_VARIABLE, "{}")).get(name, {})
    return found


def with_variables(names: Sequence[str]) -> WorkerSettings:
    """The settings of an environment that is given these variables, as only workers are."""
    return WorkerSettings(isolation="process" if names else "auto", variables=tuple(names))
