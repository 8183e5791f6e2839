"""Installed environments: find, list and remove them."""

from __future__ import annotations

from pathlib import Path

import psutil
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from buckeye.base.storage import remove_directory
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

    Raises UsageError if the installed version is unsuitable, and BuckeyeError for a damaged record.
    """
    try:
        wanted = EnvironmentId.parse(env_id)
    except UsageError:
        return None
    environment = read_record(environments_home() / canonicalize_name(wanted.name))
    if environment is None:
        return None
    if not _same_owner(wanted.owner, EnvironmentId.parse(environment.id).owner):
        return None
    if not _serves(environment.version, wanted.version):
        raise UsageError(
            f"{env_id} is asked for, but {environment.name} {environment.version} is installed. "
            f"Replace it: buckeye env install {env_id} --force"
        )
    return environment


def get_installed(env_id: str) -> InstalledEnvironment:
    """Return the installed environment. Raises EnvironmentNotFoundError with the installed names."""
    environment = find_installed(env_id)
    if environment is None:
        whole, damaged = all_installed()
        names = ", ".join([*(e.name for e in whole), *(f"{name} (damaged)" for name in damaged)]) or "none"
        raise EnvironmentNotFoundError(
            f"environment {env_id!r} is not installed in {environments_home()} (there: {names}). "
            f"Install it: buckeye env install {env_id}"
        )
    return environment


def remove_installed(environment: InstalledEnvironment) -> None:
    """Delete an installed environment. Raises BuckeyeError while a process uses it."""
    refuse_if_used(environment.folder)
    remove_directory(environment.folder)


def refuse_if_used(folder: Path) -> None:
    """Raise BuckeyeError if a process uses the interpreter of the environment in `folder`."""
    users = [process.pid for process in psutil.process_iter(["cmdline"]) if _runs_in(process, folder)]
    if users:
        raise BuckeyeError(
            f"{folder.name} is in use by process {', '.join(map(str, users))}. "
            "Wait for its end, or stop its run (`rl list` names it), and try again."
        )


def disk_bytes(folder: Path) -> int:
    """Return the disk usage of a folder in bytes."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


def _runs_in(process: psutil.Process, folder: Path) -> bool:
    words = process.info["cmdline"] or [""]
    return words[0].startswith(f"{folder}/")


def _same_owner(wanted: str | None, installed: str | None) -> bool:
    """Return True if the owners are compatible. An id without owner matches any owner."""
    return wanted is None or installed is None or wanted.lower() == installed.lower()


def _serves(installed: str, wanted: str | None) -> bool:
    """Return True if the installed version is the wanted one, or a newer release of its x.y series."""
    if wanted in (None, "latest"):
        return True
    try:
        here, asked = Version(installed), Version(str(wanted))
    except InvalidVersion:
        return installed == wanted
    return here == asked or (here > asked and here.release[:2] == asked.release[:2])
