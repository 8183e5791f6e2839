"""The keys that a run needs where it does not find them by itself: on another machine, in a job of Slurm."""

from __future__ import annotations

from buckeye.config.rl import RLConfig
from buckeye.run.gateway import mcp_tasks
from buckeye.run.rl import played_environments
from buckeye.tasks.keys import KEYS, variables
from buckeye.tasks.variables import names_in_servers

_NOT_KEYS = {"HOME", "HOSTNAME", "LANG", "LOGNAME", "PATH", "PWD", "SHELL", "TERM", "TMPDIR", "USER"}
_RENTING = "PRIME_API_KEY"  # never leaves: it could rent and end everything


def names_of_keys(config: RLConfig) -> list[str]:
    """The keys that Buckeye knows, and the variables that environments and servers of tasks are given. What
    a prompt mentions is no reason to send it."""
    known, played = variables(), played_environments(config)
    names = [*KEYS, *names_in_servers(mcp_tasks(played))]
    names += [name for env in played for name in env.variables]
    asked = dict.fromkeys(name if name in known else name.upper() for name in names)
    return [name for name in asked if name not in (*_NOT_KEYS, _RENTING)]


def keys_of_run(config: RLConfig) -> dict[str, str]:
    """Those keys, as far as they are set."""
    known = variables()
    return {name: known[name] for name in names_of_keys(config) if known.get(name)}
