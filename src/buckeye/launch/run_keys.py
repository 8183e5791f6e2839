"""API keys and other environment variables that a run needs on another machine or in a Slurm job."""

from __future__ import annotations

import os

from buckeye.base.json_lines import texts_in
from buckeye.base.keys import KEYS, variables
from buckeye.base.process import is_secret
from buckeye.config.environments import EnvConfig
from buckeye.config.rl import RLConfig
from buckeye.launch.mcp_gateways import task_variables

_NOT_KEYS = {"HOME", "HOSTNAME", "LANG", "LOGNAME", "PATH", "PWD", "SHELL", "TERM", "TMPDIR", "USER"}
_MACHINE_KEY_PREFIXES = ("PRIME_", "AWS_", "GOOGLE_", "AZURE_")
_RENTAL_KEY = "PRIME_API_KEY"  # never given to a run, because this key can rent and terminate machines
_STORE_KEYS = {
    "s3": (
        *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
        *("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"),
    )
}
"""Variables with the credentials of a checkpoint store, by its URL scheme. Only the launcher gets them."""


def rollout_environments(config: RLConfig) -> list[EnvConfig]:
    """Return the environments of training and of evaluations."""
    evaluated = config.orchestrator.eval.env if config.orchestrator.eval is not None else []
    return [*config.orchestrator.env, *evaluated]


def names_of_keys(config: RLConfig) -> list[str]:
    """Return the names of the environment variables that the run needs.

    They are the keys of Buckeye, and the variables that environments and MCP servers of tasks use. Variables
    that only occur in prompts are not included.
    """
    known, environments = variables(), rollout_environments(config)
    names = [*KEYS, *task_variables(environments)]
    names += [name for env in environments for name in env.variables]
    requested = dict.fromkeys(name if name in known else name.upper() for name in names)
    return [name for name in requested if name not in (*_NOT_KEYS, _RENTAL_KEY)]


def remove_unrelated_keys(config: RLConfig) -> None:
    """Delete cloud credentials from `os.environ`, unless the settings of the run name the variable.

    All child processes, and third-party code in them, would inherit the credentials.
    """
    named = {*names_of_keys(config), *texts_in(config.model_dump(mode="json"))}
    for name in [name for name in os.environ if name.startswith(_MACHINE_KEY_PREFIXES) and name not in named]:
        if is_secret(name):
            del os.environ[name]


def keys_of_run(config: RLConfig) -> dict[str, str]:
    """Return the variables that the run needs and that are set, with the keys of its checkpoint store."""
    known, ckpt = variables(), config.trainer.ckpt
    store = ckpt.store if ckpt is not None and ckpt.store is not None else ""
    names = [*names_of_keys(config), *_STORE_KEYS.get(store.partition("://")[0], ())]
    return {name: known[name] for name in names if known.get(name)}
