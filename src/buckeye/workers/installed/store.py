"""Installed environments: find, list and remove them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

import psutil
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from buckeye.base.storage import remove_directory
from buckeye.config.problems import suggestion
from buckeye.envs.registry import EnvironmentId
from buckeye.errors import BuckeyeError, EnvironmentNotFoundError, UsageError
from buckeye.workers.installed.record import InstalledEnvironment, environments_home, read_record


def all_installed() -> tuple[list[InstalledEnvironment], dict[str, str]]:
    """Return all installed environments, and the problems of damaged ones by folder name."""
    home = environments_home()
    found: list[InstalledEnvironment] = []
    damaged: dict[str, str] = {}
    for folder in sorted(home.iterdir()) if home.is_dir() else []:
        if folder.name.startswith("."):
            continue
        try:
            environment = read_record(folder)
        except BuckeyeError as error:
            damaged[folder.name] = str(error)
        else:
            found += [environment] if environment is not None else []
    return found, damaged


def find_installed(env_id: str) -> InstalledEnvironment | None:
    """Return the installed environment for NAME or OWNER/NAME, with optional @VERSION; None if not installed.

    Raises UsageError if the installed version differs from VERSION, and BuckeyeError for a damaged record. A
    newer release of the same x.y series counts as VERSION.
    """
    try:
        wanted = EnvironmentId.parse(env_id)
    except UsageError:
        return None
    environment = read_record(environments_home() / canonicalize_name(wanted.name))
    if environment is None:
        return None
    if not _is_same_owner(wanted.owner, EnvironmentId.parse(environment.id).owner):
        return None
    if not _is_compatible(environment.version, wanted.version):
        raise UsageError(
            f"{env_id} is not available: {environment.name} {environment.version} is installed",
            code="BK-PACKAGE-VERSION",
            hint=f"replace it: buckeye env install {env_id} --force",
        )
    return environment


def get_installed(env_id: str) -> InstalledEnvironment:
    """Return the installed environment. Raises EnvironmentNotFoundError, which lists the installed names."""
    environment = find_installed(env_id)
    if environment is None:
        valid, damaged = all_installed()
        names = ", ".join([*(e.name for e in valid), *(f"{name} (damaged)" for name in damaged)]) or "none"
        raise EnvironmentNotFoundError(
            f"environment {env_id!r} is not installed in {environments_home()} (installed: {names})",
            hint=suggest_id(env_id, [e.id for e in valid]) or f"install it: buckeye env install {env_id}",
        )
    return environment


def suggest_id(env_id: str, known: Iterable[str]) -> str | None:
    """Return a hint that suggests known ids with a name similar to that of `env_id`, or None.

    If a known id has the exact name, only its owner differs. Then `env_id` has no typo, and gets no hint.
    """
    ids = {str(canonicalize_name(known_id.rpartition("/")[2])): known_id for known_id in known}
    name = str(canonicalize_name(env_id.partition("@")[0].rpartition("/")[2]))
    close = difflib.get_close_matches(name, ids, cutoff=0.8) if name not in ids else []
    return suggestion([ids[other] for other in close])


def remove_installed(environment: InstalledEnvironment) -> None:
    """Delete an installed environment. Raises BuckeyeError while a process uses it."""
    refuse_if_used(environment.folder)
    remove_directory(environment.folder)


def refuse_if_used(folder: Path) -> None:
    """Raise BuckeyeError if a process uses the interpreter of the environment in `folder`."""
    users = [process.pid for process in psutil.process_iter(["cmdline"]) if _runs_in(process, folder)]
    if users:
        raise BuckeyeError(
            f"{folder.name} is in use by process {', '.join(map(str, users))}",
            code="BK-ENV-INSTALL",
            hint="wait until the process ends, or stop its run (`rl list` shows runs), then retry",
        )


def _runs_in(process: psutil.Process, folder: Path) -> bool:
    command = process.info["cmdline"] or [""]
    return command[0].startswith(f"{folder}/")


def _is_same_owner(wanted: str | None, installed: str | None) -> bool:
    """Return True if the owners are compatible. An id without owner matches any owner."""
    return wanted is None or installed is None or wanted.lower() == installed.lower()


def _is_compatible(installed: str, wanted: str | None) -> bool:
    """Return True if the installed version is the wanted one, or a newer release of its x.y series."""
    if wanted in (None, "latest"):
        return True
    try:
        current, requested = Version(installed), Version(str(wanted))
    except InvalidVersion:
        return installed == wanted
    return current == requested or (current > requested and current.release[:2] == requested.release[:2])
