"""Installation of an environment: complete, or without effect."""

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
from buckeye.workers.installed.install_source import InstallSource, parse_source
from buckeye.workers.installed.interface import Interface, detect_interface, without_bounds_on
from buckeye.workers.installed.lock_file import LockFile, Report, lock_text, pins_of, read_lock
from buckeye.workers.installed.private_index import KEY_VARIABLE, fetch_private, hub_key
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
from buckeye.workers.installed.venv import Index, Installer, find_needed_python, find_uv


@dataclass(frozen=True, kw_only=True, slots=True)
class InstallRequest:
    """Arguments of an installation.

    `what` has the format of `parse_source`. `extra` are further requirements. `python` is the interpreter
    (None: this one). `locked` is a lock file whose versions are installed exactly.
    """

    what: str
    index: str | None = None
    python: str | None = None
    extra: Sequence[str] = ()
    locked: Path | None = None
    force: bool = False


def install_environment(request: InstallRequest, report: Report) -> InstalledEnvironment:
    """Install an environment into its own folder.

    It is built under a temporary name and renamed when complete. Raises UsageError for a request that cannot
    be met. Raises BuckeyeError if the installer or the hub fails, or if the package has no environment.
    """
    source = parse_source(request.what, request.index)
    lock = read_lock(request.locked) if request.locked is not None else None
    folder = environments_home() / source.name
    _check_free(folder, request)
    write_directory(
        folder, lambda half: _fill(half, folder, source, request, lock, report), replace=request.force
    )
    installed = read_record(folder)
    assert installed is not None
    return installed


def _check_free(folder: Path, request: InstallRequest) -> None:
    if not folder.exists():
        return
    installed = _replaced(folder, request)
    if installed is not None and not request.force:
        raise UsageError(
            f"{installed.name} {installed.version} is installed already, from {installed.source}. "
            f"Replace it: buckeye env install {request.what} --force"
        )
    refuse_if_used(folder)


def _replaced(folder: Path, request: InstallRequest) -> InstalledEnvironment | None:
    """Return the installed environment that would be replaced; None if it is damaged and `force` is set."""
    try:
        installed = read_record(folder)
    except BuckeyeError:
        if request.force:
            return None
        raise
    if installed is None:
        raise UsageError(f"{folder} exists and is no installed environment: move it away first.")
    return installed


def _fill(
    half: Path,
    folder: Path,
    source: InstallSource,
    request: InstallRequest,
    lock: LockFile | None,
    report: Report,
) -> None:
    """Build the environment in `half`, which is renamed to `folder` later."""
    installer = Installer(half / VENV, find_uv())
    report(f"Making an environment for {source.env_id} in {folder} with {installer.name}")
    installer.create(request.python)
    with TemporaryDirectory(dir=half) as scratch:
        try:
            interface = _install(installer, Path(scratch), source, request, lock, report)
        except BuckeyeError as error:
            if (needed := find_needed_python(str(error))) is None:
                raise
            version, where = installer.python_version(), f"buckeye env install {request.what}"
            raise BuckeyeError(
                f"{source.env_id}, or something that it needs, is not for Python {version} but for "
                f"Python {needed.specifier}. Another one can be made: {where} --python {needed.version}"
                f"\n{error}"
            ) from None
    distributions = installer.distributions()
    pins = pins_of(distributions)
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
        constraints=[] if lock else list(interface.constraints),
        requirements=pins,
        installed_at=datetime.now(UTC),
    )
    local = source.name if source.name not in installer.hashes or source.path is not None else None
    head = f"{environment.id} {environment.version}, Python {environment.python_version}: exact versions"
    (half / LOCK).write_text(lock_text(pins, installer.hashes, local=local, head=head), encoding="utf-8")
    (half / RECORD).write_bytes(to_json(environment))
    _call_by_final_name(half, folder)
    _check_free(folder, request)  # another process may have installed or used it meanwhile


def _install(
    installer: Installer,
    scratch: Path,
    source: InstallSource,
    request: InstallRequest,
    lock: LockFile | None,
    report: Report,
) -> Interface:
    """Install the package alone to detect its interface, then its dependencies within the tested bounds."""
    report(f"Fetching {source.requirement}")
    _install_alone(installer, scratch, _pinned(source, lock))
    found = detect_interface(installer.distribution(source.name), source.extras)
    interface = without_bounds_on(found, request.extra)
    everywhere = Index(url=source.index)
    if lock is not None:
        report(f"Installing the {len(lock.pins)} locked versions")
        _install_locked(installer, scratch, source.name, lock, everywhere)
    else:
        _install_needs(installer, scratch, source, request, interface, report)
    installer.find_hashes(pins_of(installer.distributions()), index=everywhere, folder=scratch)
    return interface


def _install_needs(
    installer: Installer,
    scratch: Path,
    source: InstallSource,
    request: InstallRequest,
    interface: Interface,
    report: Report,
) -> None:
    """Install the dependencies of the package and of its interface, and the requested extra requirements."""
    version = installer.distribution(source.name).version
    extras = ",".join(sorted({*source.extras, *interface.extras}))
    itself = f"{source.name}[{extras}]" if extras else source.name
    bounds = f" ({', '.join(interface.constraints)})" if interface.constraints else ""
    report(f"{source.name} {version} is of kind {interface.generation}. Installing what it needs{bounds}")
    installer.install(
        f"{itself}=={version}",
        *interface.requirements,
        *request.extra,
        index=Index(url=source.index),
        constraints=interface.constraints,
        folder=scratch,
    )


def _pinned(source: InstallSource, lock: LockFile | None) -> InstallSource:
    """Return the source in its locked version."""
    if lock is None or source.path is not None:
        return source
    if source.name not in lock.pins:
        raise UsageError(f"--locked: the file has no version of {source.name}; is it another environment's?")
    return replace(source, specifier=f"=={lock.pins[source.name]}")


def _install_alone(installer: Installer, scratch: Path, source: InstallSource) -> None:
    """Install the package without dependencies, from its index only.

    A package that is missing in the hub's public index is downloaded with the hub key.
    """
    index = Index(url=source.index, is_exclusive=True) if source.path is None else Index()
    try:
        installer.install(source.requirement, index=index, dependencies=False, folder=scratch)
        return
    except BuckeyeError as error:
        if source.kind != "hub":
            raise
        key = hub_key()
        if key is None:
            raise BuckeyeError(
                f"{error}\nThe hub's public index, {source.index}, did not give "
                f"{source.env_id}{source.specifier}. If it is private, set {KEY_VARIABLE} and try again."
            ) from None
    fetched = fetch_private(source, key, scratch)
    installer.install(str(fetched), dependencies=False, folder=scratch)


def _install_locked(installer: Installer, scratch: Path, name: str, lock: LockFile, index: Index) -> None:
    """Install the locked versions of all other packages. Raises BuckeyeError if the result differs."""
    others = {locked: version for locked, version in lock.pins.items() if locked != name}
    if others:
        pins = scratch / "locked.txt"
        pins.write_text(lock.without(name), encoding="utf-8")
        installer.install("--requirement", str(pins), index=index, dependencies=False, folder=scratch)
    here: dict[str, str] = {canonicalize_name(d.name): d.version for d in installer.distributions()}
    wrong = [f"{n} {here.get(n, 'missing')} instead of {v}" for n, v in lock.pins.items() if here.get(n) != v]
    if wrong:
        raise BuckeyeError(f"what was installed is not what is locked: {', '.join(wrong)}.")


def _call_by_final_name(half: Path, folder: Path) -> None:
    """Replace the temporary path by the final one in the scripts and settings of the virtual environment."""
    old, new = os.fsencode(half), os.fsencode(folder)
    venv = half / VENV
    for path in [venv / "pyvenv.cfg", *(venv / "bin").iterdir()]:
        if path.is_symlink() or not path.is_file():
            continue
        content = path.read_bytes()
        if old in content and b"\0" not in content:
            path.write_bytes(content.replace(old, new))
