"""Atomic installation of an environment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from packaging.utils import canonicalize_name

from buckeye.base.storage import write_directory
from buckeye.errors import BuckeyeError, UsageError
from buckeye.workers.installed.install_source import InstallSource, parse_source, suggest_project
from buckeye.workers.installed.interface import Interface, detect_interface, without_bounds_on
from buckeye.workers.installed.lock_file import LockFile, Report, lock_text, pins_of, read_lock
from buckeye.workers.installed.private_index import KEY_VARIABLE, fetch_private, hub_account
from buckeye.workers.installed.record import (
    LOCK,
    RECORD,
    VENV,
    InstalledEnvironment,
    environments_home,
    read_record,
    to_json,
)
from buckeye.workers.installed.store import refuse_if_used
from buckeye.workers.installed.venv import Installer, find_needed_python, find_uv


@dataclass(frozen=True, kw_only=True, slots=True)
class InstallRequest:
    """Arguments of an installation.

    `what` names the environment in a format of `parse_source`. `extra` are packages to install in addition.
    `python` is the interpreter (None: the running interpreter). `locked` is a lock file with the exact
    versions to install. `force` replaces an installed environment.
    """

    what: str
    index: str | None = None
    python: str | None = None
    extra: Sequence[str] = ()
    locked: Path | None = None
    force: bool = False


def install_environment(request: InstallRequest, report: Report) -> InstalledEnvironment:
    """Install an environment into its own folder.

    The folder gets its final name when the installation is complete. Raises UsageError for an invalid
    request, or if the environment is installed already. Raises BuckeyeError if the installer or the hub
    fails, or if the package has no environment.
    """
    lock = read_lock(request.locked) if request.locked is not None else None
    source = _pinned(parse_source(request.what, request.index), lock)
    folder = environments_home() / source.name
    _check_free(folder, request)
    write_directory(folder, _Installation(request, source, lock, folder, report).build, replace=request.force)
    installed = read_record(folder)
    assert installed is not None
    return installed


def _check_free(folder: Path, request: InstallRequest) -> None:
    if not folder.exists():
        return
    try:
        installed = read_record(folder)
    except BuckeyeError:
        if not request.force:  # else replace the environment with the damaged record
            raise
    else:
        if installed is None:
            raise UsageError(
                f"{folder} exists, but is not an installed environment",
                code="BK-FILE-EXISTS",
                hint="move or delete the folder",
            )
        if not request.force:
            raise UsageError(
                f"{installed.name} {installed.version} is installed already, from {installed.source}",
                code="BK-FILE-EXISTS",
                hint=f"replace it: buckeye env install {request.what} --force",
            )
    refuse_if_used(folder)


def _pinned(source: InstallSource, lock: LockFile | None) -> InstallSource:
    """Return the source with the version that the lock file has for it."""
    if lock is None or source.path is not None:
        return source
    if source.name not in lock.pins:
        raise UsageError(
            f"--locked: the file has no version of {source.name}",
            code="BK-ENV-INSTALL",
            hint="pass the lock file of this environment",
        )
    return replace(source, specifier=f"=={lock.pins[source.name]}")


@dataclass(slots=True)
class _Installation:
    """Installation of one environment into `folder`."""

    request: InstallRequest
    source: InstallSource
    lock: LockFile | None
    folder: Path
    report: Report

    def build(self, staging: Path) -> None:
        """Install the environment into `staging`. `write_directory` then renames `staging` to `folder`."""
        source, folder = self.source, self.folder
        installer = Installer(staging / VENV, find_uv())
        self.report(f"Creating a virtual environment for {source.env_id} in {folder} with {installer.name}")
        installer.create(self.request.python)
        with TemporaryDirectory(dir=staging) as scratch:
            try:
                interface = self._install(installer, Path(scratch))
            except BuckeyeError as error:
                if source.path is None and (near := suggest_project(self.request.what)):
                    error.hint = near
                if (needed := find_needed_python(str(error))) is None:
                    raise
                specifier, suitable = needed
                version, command = installer.python_version(), f"buckeye env install {self.request.what}"
                raise BuckeyeError(
                    f"{source.env_id}, or one of its dependencies, requires Python {specifier}, not "
                    f"{version}: {error.message}",
                    code="BK-ENV-INSTALL",
                    hint=f"use another interpreter: {command} --python {suitable}",
                ) from None
        pins = pins_of(installer.distributions())
        environment = InstalledEnvironment(
            name=source.name,
            id=source.env_id,
            version=installer.distribution(source.name).version,
            generation=interface.generation,
            module=interface.module,
            source=source.text if source.path is None else str(source.path),
            extras=sorted({*source.extras, *interface.extras}),
            index=source.index,
            python=folder / VENV / "bin" / "python",
            python_version=installer.python_version(),
            constraints=[] if self.lock else list(interface.constraints),
            requirements=pins,
            installed_at=datetime.now(UTC),
        )
        local = source.name if source.name not in installer.hashes or source.path is not None else None
        head = f"{environment.id} {environment.version}, Python {environment.python_version}: exact versions"
        lock = lock_text(pins, installer.hashes, local=local, head=head)
        (staging / LOCK).write_text(lock, encoding="utf-8")
        (staging / RECORD).write_bytes(to_json(environment))
        _replace_staging_path(staging, folder)
        _check_free(folder, self.request)  # another process may have installed or started it

    def _install(self, installer: Installer, scratch: Path) -> Interface:
        """Install the package without dependencies, detect its interface, then install its dependencies."""
        source = self.source
        self.report(f"Fetching {source.requirement}")
        self._install_alone(installer, scratch)
        detected = detect_interface(installer.distribution(source.name), source.extras)
        interface = without_bounds_on(detected, self.request.extra)
        if self.lock is not None:
            self.report(f"Installing the {len(self.lock.pins)} locked versions")
            self._install_locked(installer, scratch, self.lock)
        else:
            self._install_dependencies(installer, scratch, interface)
        installer.find_hashes(pins_of(installer.distributions()), index=source.index, folder=scratch)
        return interface

    def _install_alone(self, installer: Installer, scratch: Path) -> None:
        """Install the package without dependencies, from its index only.

        If the hub's public index lacks the package, download the package with the hub key.
        """
        source = self.source
        index = source.index if source.path is None and source.repository is None else None
        try:
            installer.install(
                source.requirement, index=index, is_exclusive=True, dependencies=False, folder=scratch
            )
            return
        except BuckeyeError as error:
            if source.kind != "hub":
                raise
            account = hub_account()
            if account is None:
                raise BuckeyeError(
                    f"cannot get {source.env_id}{source.specifier} from the hub's public index "
                    f"{source.index}: {error.message}",
                    code=error.code,
                    hint="check the network, and retry"
                    if error.code == "BK-NETWORK"
                    else f"if it is private, set {KEY_VARIABLE} and retry",
                ) from None
        fetched = fetch_private(source, account, scratch)
        installer.install(str(fetched), dependencies=False, folder=scratch)

    def _install_dependencies(self, installer: Installer, scratch: Path, interface: Interface) -> None:
        """Install the dependencies of the package, the requirements of its interface, and `request.extra`."""
        name, version = self.source.name, installer.distribution(self.source.name).version
        extras = ",".join(sorted({*self.source.extras, *interface.extras}))
        package = f"{name}[{extras}]" if extras else name
        bounds = f" ({', '.join(interface.constraints)})" if interface.constraints else ""
        self.report(
            f"{name} {version} has the interface {interface.generation}; installing its dependencies{bounds}"
        )
        installer.install(
            f"{package}=={version}",
            *interface.requirements,
            *self.request.extra,
            index=self.source.index,
            constraints=interface.constraints,
            folder=scratch,
        )

    def _install_locked(self, installer: Installer, scratch: Path, lock: LockFile) -> None:
        """Install the other packages of the lock file.

        Raises BuckeyeError if an installed version differs.
        """
        if lock.pins.keys() - {self.source.name}:
            pins = scratch / "locked.txt"
            pins.write_text(lock.without(self.source.name), encoding="utf-8")
            installer.install(
                "--requirement", str(pins), index=self.source.index, dependencies=False, folder=scratch
            )
        installed: dict[str, str] = {canonicalize_name(d.name): d.version for d in installer.distributions()}
        differences = [
            f"{name} {installed.get(name, 'missing')} instead of {version}"
            for name, version in lock.pins.items()
            if installed.get(name) != version
        ]
        if differences:
            raise BuckeyeError(
                f"the installed versions differ from the lock file: {', '.join(differences)}",
                code="BK-ENV-INSTALL",
            )


def _replace_staging_path(staging: Path, folder: Path) -> None:
    """Replace the temporary path by the final one in the scripts and settings of the virtual environment."""
    old, new = os.fsencode(staging), os.fsencode(folder)
    venv = staging / VENV
    for path in [venv / "pyvenv.cfg", *(venv / "bin").iterdir()]:
        if path.is_symlink() or not path.is_file():
            continue
        content = path.read_bytes()
        if old in content and b"\0" not in content:
            path.write_bytes(content.replace(old, new))
