"""The servers that environments need beside the run: gateways, where tasks name MCP servers on this machine.

Who knows such environments starts their servers; the core asks, and without any there is nothing to start.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from buckeye.base.distribution import ask, is_there
from buckeye.base.keys import KEYS, variables
from buckeye.base.process import is_secret
from buckeye.config.environments import EnvConfig, TrainEnvConfig
from buckeye.config.rl import RLConfig
from buckeye.launch.plan import Role, Site

_MCP = "buckeye.mcp"
_FOR_RUNS = "buckeye.launch.mcp_gateways"
_WHAT = "an environment of MCP servers"
_WORKER_HOSTS = "buckeye.launch.worker_hosts:worker_hosts"
DEFAULT_ROLLOUTS = 64
"""At a time, where nobody has said how many are played."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hosts:
    """The processes that a run starts for its environments, looks after and ends, and the variables that all
    its processes need for them: a key, where there is none."""

    roles: tuple[Role, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


def run_hosts(
    environments: Sequence[EnvConfig], *, rollouts: int, sites: Mapping[int, Site], address: str | None
) -> Hosts:
    """What has to be started for a run that plays so many `rollouts` at a time, and has other nodes at
    `sites`, which reach this one at `address`. Raises UsageError for tasks that cannot be read, and for what
    cannot be placed."""
    hosts = Hosts()
    if is_there(_MCP):
        hosts = ask(f"{_FOR_RUNS}:run_gateways", _WHAT)(environments, rollouts=rollouts)
    placed = [env for env in environments if isinstance(env, TrainEnvConfig) and any(env.placement or ())]
    if placed:
        more = ask(_WORKER_HOSTS, "an environment in workers")(placed, sites=sites, address=address)
        hosts = Hosts(roles=(*hosts.roles, *more.roles), env={**hosts.env, **more.env})
    return hosts


def hosts_here(
    environments: Iterable[EnvConfig], log_file: Path, *, rollouts: int
) -> AbstractContextManager[None]:
    """The same for environments that are played in this process: started before the block, ended after it.
    Raises as `run_hosts` does, and RunError for what does not get ready."""
    if not is_there(_MCP):
        return nullcontext()
    here: AbstractContextManager[None] = ask(f"{_FOR_RUNS}:gateway_here", _WHAT)(
        environments, log_file, rollouts=rollouts
    )
    return here


def variables_of(environments: Iterable[EnvConfig]) -> list[str]:
    """The names of the variables that the servers of the environments are given. Raises as `run_hosts`."""
    if not is_there(_MCP):
        return []
    names: list[str] = ask(f"{_FOR_RUNS}:variables_of", _WHAT)(environments)
    return names


# The keys that a run needs where it does not find them by itself: on another machine, in a job of Slurm.

_NOT_KEYS = {"HOME", "HOSTNAME", "LANG", "LOGNAME", "PATH", "PWD", "SHELL", "TERM", "TMPDIR", "USER"}
_OF_MACHINES = ("PRIME_", "AWS_", "GOOGLE_", "AZURE_")
_RENTING = "PRIME_API_KEY"  # never leaves: it could rent and end everything


def played_environments(config: RLConfig) -> list[EnvConfig]:
    """The environments of training and of evaluations."""
    evaluated = config.orchestrator.eval.env if config.orchestrator.eval is not None else []
    return [*config.orchestrator.env, *evaluated]


def names_of_keys(config: RLConfig) -> list[str]:
    """The keys that Buckeye knows, and the variables that environments and servers of tasks are given. What
    a prompt mentions is no reason to send it."""
    known, played = variables(), played_environments(config)
    names = [*KEYS, *variables_of(played)]
    names += [name for env in played for name in env.variables]
    asked = dict.fromkeys(name if name in known else name.upper() for name in names)
    return [name for name in asked if name not in (*_NOT_KEYS, _RENTING)]


def forget_other_keys(config: RLConfig) -> None:
    """Take from this process the keys to machines, unless the run's settings name them: what it starts, also
    by libraries of others, has its variables."""
    named = {*names_of_keys(config), *_texts(config.model_dump(mode="json"))}
    for name in [name for name in os.environ if name.startswith(_OF_MACHINES) and name not in named]:
        if is_secret(name):
            del os.environ[name]


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for item in items for text in _texts(item)]


def keys_of_run(config: RLConfig) -> dict[str, str]:
    """Those keys, as far as they are set."""
    known = variables()
    return {name: known[name] for name in names_of_keys(config) if known.get(name)}
