"""`load_environment("owner/name@version")`: open an environment in this process or in workers.

An environment that was written for Buckeye, and that this process can import, runs in this process
(`envs.registry`). All other environments run in worker processes.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from buckeye.envs.base import Environment
from buckeye.envs.registry import (
    AGENT,
    CALLER,
    LIBRARIES,
    EnvironmentId,
    build_environment,
    check_environment,
    find_bundled_project,
    find_local_loader,
    install_commands,
    installed_environments,
    missing_members,
)
from buckeye.envs.settings import WorkerSettings
from buckeye.errors import EnvironmentNotFoundError, UsageError
from buckeye.workers.environment import open_worker_environment
from buckeye.workers.installed import all_installed, find_installed
from buckeye.workers.installed.install_source import unsupported_library_error
from buckeye.workers.installed.store import suggest_id

log = logging.getLogger(__name__)


def load_environment(env_id: str, **args: Any) -> Environment:
    """Return the environment `env_id`, built with `args`, in this process or in workers.

    Raises EnvironmentNotFoundError and UsageError like `open_environment`.
    """
    return open_environment(env_id, args, WorkerSettings())


def open_environment(env_id: str, args: Mapping[str, Any], settings: WorkerSettings) -> Environment:
    """Return the environment `env_id`, built with `args`, in this process or in workers.

    Raises EnvironmentNotFoundError, with the install commands, if nothing installed has the id. Raises
    UsageError for a different installed version, wrong arguments, an object that is not an environment, and
    an environment that fails to load in a worker.
    """
    environment = open_in_process(env_id, args, settings)
    return environment if environment is not None else _open_worker(env_id, args, settings)


def open_in_process(env_id: str, args: Mapping[str, Any], settings: WorkerSettings) -> Environment | None:
    """Return the environment if it runs in this process; None if workers run it.

    Raises EnvironmentNotFoundError if neither this process nor a worker can run the environment. Raises
    UsageError like `open_environment`.
    """
    if env_id == CALLER:
        return _caller_environment(settings)
    if settings.isolation == "none":
        loader = find_local_loader(env_id)
        if loader is None:
            raise _not_found(env_id)
        return check_environment(env_id, build_environment(env_id, loader, args))
    if settings.isolation == "auto" and settings.python is None:
        environment = _build_in_process(env_id, args)
        if environment is not None:
            return environment
    find_interpreter(env_id, settings)
    return None


CALLER_ENVIRONMENTS: list[Environment] = []
"""Environment objects passed to running `buckeye.evaluate` calls; the last one has the id CALLER."""


def _caller_environment(settings: WorkerSettings) -> Environment | None:
    """Return the caller's environment object; None if another process serves it."""
    if CALLER_ENVIRONMENTS or settings.nodes:
        return CALLER_ENVIRONMENTS[-1] if CALLER_ENVIRONMENTS else None
    raise UsageError(
        "the environment of this run is an object in the Python process that started the run, "
        "and that process has ended",
        code="BK-ENV-CALLER",
        hint="resume from Python, with the same object:\n"
        '  buckeye.open_run("RUN").resume(reward=..., env=...)',
    )


def _build_in_process(env_id: str, args: Mapping[str, Any]) -> Environment | None:
    """Return the environment if it was written for Buckeye and can be imported here, else None.

    A module without an entry point is not imported if the environment is installed in a separate interpreter.
    """
    name = canonicalize_name(env_id.partition("@")[0].rpartition("/")[2])
    is_registered = name in map(canonicalize_name, installed_environments())
    if not is_registered and find_installed(package_name(env_id)) is not None:
        return None
    loader = find_local_loader(env_id)
    if loader is None:
        return None
    environment = build_environment(env_id, loader, args)
    if missing_members(environment) and "verifiers" in sys.modules:
        return None
    return check_environment(env_id, environment)


def _open_worker(env_id: str, args: Mapping[str, Any], settings: WorkerSettings) -> Environment:
    """Load the environment in a worker, with the interpreter that `find_interpreter` returns."""
    package = package_name(env_id)
    installed = find_installed(package)
    if installed is not None and (edited := installed.edited_file()) is not None:
        log.warning(
            "Environment %s was installed before %s was edited. Reinstall it: buckeye env install %s --force",
            env_id,
            edited,
            installed.source,
        )
    if installed is not None and package == env_id:
        settings = replace(settings, module=installed.module)
    elif find_bundled_project(env_id) is not None:
        settings = replace(settings, module=__name__)
    return open_worker_environment(env_id, args, find_interpreter(env_id, settings), settings)


def find_interpreter(env_id: str, settings: WorkerSettings) -> Path:
    """Return the interpreter for the workers of an environment.

    Raises EnvironmentNotFoundError if the environment is not on this machine.
    """
    if settings.python is not None:
        return settings.python
    installed = find_installed(package_name(env_id))
    if installed is not None:
        return installed.python
    if _can_run_in_this_interpreter(env_id):
        return Path(sys.executable)
    raise _not_found(env_id)


def package_name(env_id: str) -> str:
    """Return the name of an environment's package: `reasoning-gym` for `reasoning-gym/chain_sum`."""
    library = env_id.partition("/")[0]
    return library if library in LIBRARIES else env_id


def _can_run_in_this_interpreter(env_id: str) -> bool:
    """Return True if this interpreter can run the worker."""
    if env_id in (AGENT, CALLER):
        return True
    if (library := env_id.partition("/")[0]) in LIBRARIES:
        return importlib.util.find_spec(LIBRARIES[library]) is not None
    return find_local_loader(env_id) is not None


def _not_found(env_id: str) -> EnvironmentNotFoundError:
    library = env_id.partition("/")[0]
    if library in LIBRARIES:
        return EnvironmentNotFoundError(
            f"environment {env_id!r} needs {library}, which is not installed",
            code="BK-PACKAGE-MISSING",
            hint=f"install it with:\n  buckeye env install {library}",
        )
    if unsupported := unsupported_library_error(library.partition("@")[0]):
        return EnvironmentNotFoundError(
            f"environment {env_id!r}: {unsupported.message}", code=unsupported.code, hint=unsupported.hint
        )
    installed = sorted({*installed_environments(), *(env.id for env in all_installed()[0])})
    close = suggest_id(env_id, installed)
    shown = "" if close else f" (installed: {', '.join(installed) or 'none'})"
    return EnvironmentNotFoundError(
        f"environment {env_id!r} is not installed{shown}",
        hint=close or install_commands(EnvironmentId.parse(env_id)),
    )
