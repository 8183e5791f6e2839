"""Read the code of Buckeye and the package versions of this machine, to install them on another machine."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from buckeye.base.distribution import CODE_FOLDER, DISTRIBUTION

PLATFORM_SPECIFIC = ("torch", "triton")
"""Distributions with a separate build for each kind of machine."""


def code_files() -> dict[str, bytes]:
    """Return the content of the files of Buckeye and of its package metadata, by path."""
    return _package(Path(CODE_FOLDER)) | _metadata(metadata.distribution(DISTRIBUTION))


def _package(folder: Path) -> dict[str, bytes]:
    return {
        f"{folder.name}/{path.relative_to(folder).as_posix()}": path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    }


def _metadata(distribution: metadata.Distribution) -> dict[str, bytes]:
    folder = f"{distribution.name.replace('-', '_')}.dist-info"
    return {
        f"{folder}/METADATA": (distribution.read_text("METADATA") or "").encode(),
        f"{folder}/entry_points.txt": (distribution.read_text("entry_points.txt") or "").encode(),
    }


def pinned_requirements(lines: Iterable[str]) -> list[str]:
    """Return the installed requirements and their dependencies, as lines `name==version`.

    torch and triton are left out, because they have a separate build for each kind of machine.
    """
    return sorted(
        f"{name}=={version}"
        for name, version in installed_versions(lines).items()
        if name not in PLATFORM_SPECIFIC
    )


def installed_versions(lines: Iterable[str]) -> dict[str, str]:
    """Return the versions of the installed requirements and of their dependencies, by canonical name.

    Libraries of NVIDIA are left out.
    """
    found: dict[str, str] = {}
    queue = [Requirement(line) for line in lines]
    while queue:
        need = queue.pop()
        name = canonicalize_name(need.name)
        if name in found or name.startswith("nvidia-"):
            continue
        try:
            installed = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        found[name] = installed.version
        queue += [
            dependency
            for dependency in map(Requirement, installed.requires or [])
            if _applies(dependency, need.extras)
        ]
    return found


def torch_version() -> str:
    """Return the version of the installed torch without its build, such as `2.7.1`, or "" without torch."""
    try:
        return metadata.version("torch").partition("+")[0]
    except metadata.PackageNotFoundError:
        return ""


def _applies(need: Requirement, extras: Iterable[str]) -> bool:
    return need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in ("", *extras))
