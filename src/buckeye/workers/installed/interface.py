"""Detection of the kind of environment in a distribution, and tested versions of its dependencies.

`verifiers` 0.4 removed its classic interface (v0: `load_environment`). Packages that need v0 rarely require
`verifiers<0.4`, so this module adds that bound.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import cast

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from buckeye.envs.registry import LIBRARIES
from buckeye.errors import BuckeyeError
from buckeye.workers.installed.record import Generation

ENTRY_POINT_GROUP = "buckeye.environments"

_V0_RELEASE, _V1_RELEASE = Version("0.3.1"), Version("0.4.0")
_USES_V1 = re.compile(
    r"^\s*(?:from\s+verifiers\.v1\b|import\s+verifiers\.v1\b|from\s+verifiers\s+import\s.*\bv1\b)", re.M
)
_HAS_LOADER = re.compile(r"^(?:async\s+)?def\s+load_environment\b|\bimport\b.*\bload_environment\b", re.M)


@dataclass(frozen=True, kw_only=True, slots=True)
class Interface:
    """Kind of environment in a distribution (`generation`), and the module that has it.

    `extras` are extras of the distribution that the environment needs. `requirements` are packages to install
    in addition. `constraints` are bounds on versions.
    """

    generation: Generation
    module: str
    extras: tuple[str, ...] = ()
    requirements: tuple[str, ...] = ()
    constraints: tuple[str, ...] = ()


def detect_interface(distribution: metadata.Distribution, extras: Sequence[str] = ()) -> Interface:
    """Return the interface of a distribution, read from its metadata and source code without importing it.

    Raises BuckeyeError if the distribution has no environment.
    """
    name = canonicalize_name(distribution.name)
    requirements = _requirements(distribution)
    if name in LIBRARIES:
        return Interface(generation=cast("Generation", name), module=LIBRARIES[name])
    interface = _verifiers_interface(distribution, requirements, tuple(extras))
    if interface is None and (entry_point := _entry_point(distribution)) is not None:
        interface = Interface(generation="buckeye", module=entry_point.partition(":")[0])
    if interface is None:
        raise BuckeyeError(
            f"{distribution.name} {distribution.version} has no environment: it does not require "
            f"`verifiers`, has no `{ENTRY_POINT_GROUP}` entry point, and its module has no "
            "`load_environment`",
            code="BK-ENV-LOAD",
            hint="check the name of the package",
        )
    bounded: set[str] = {canonicalize_name(r.name) for r in requirements if r.specifier and not _extras_of(r)}
    constraints = [c for c in interface.constraints if _applies(c, bounded)]
    return replace(interface, constraints=tuple(constraints))


def without_bounds_on(interface: Interface, requirements: Sequence[str]) -> Interface:
    """Return the interface without bounds on the packages that have a version in `requirements`."""
    pinned = set[str]()
    for text in requirements:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue  # a path, which the installer handles
        pinned |= {canonicalize_name(requirement.name)} if requirement.specifier or requirement.url else set()
    constraints = [c for c in interface.constraints if canonicalize_name(Requirement(c).name) not in pinned]
    return replace(interface, constraints=tuple(constraints))


def _applies(constraint: str, bounded: set[str]) -> bool:
    """Return True if the constraint is on `verifiers`, or on a package that is not in `bounded`."""
    name = canonicalize_name(Requirement(constraint).name)
    return name == "verifiers" or name not in bounded


def _verifiers_interface(
    distribution: metadata.Distribution, requirements: Sequence[Requirement], extras: tuple[str, ...]
) -> Interface | None:
    """Return the interface to `verifiers`, or None if the distribution has none."""
    module, sources = _module_name(distribution), _source_texts(distribution)
    required = [r for r in requirements if r.name == "verifiers" and not _extras_of(r)]
    uses_v1 = any(map(_USES_V1.search, sources))
    if required:
        return _verifiers_interface_of(module, required[0].specifier, uses_v1, ())
    offered = {e: r for r in requirements if r.name == "verifiers" for e in _extras_of(r)}
    chosen = [e for e in extras if e in offered]
    if offered:
        if extras and not chosen:
            return None
        by_age = sorted(offered, key=lambda e: not offered[e].specifier.contains(_V0_RELEASE))
        extra = chosen[0] if chosen else by_age[0]
        return _verifiers_interface_of(module, offered[extra].specifier, False, (extra,))
    if uses_v1 or (_entry_point(distribution) is None and any(map(_HAS_LOADER.search, sources))):
        return _verifiers_interface_of(module, SpecifierSet(), uses_v1, ())
    return None


def _verifiers_interface_of(
    module: str, specifier: SpecifierSet, uses_v1: bool, extras: tuple[str, ...]
) -> Interface:
    allows_v0, allows_v1 = specifier.contains(_V0_RELEASE), specifier.contains(_V1_RELEASE, prereleases=True)
    if allows_v1 and (uses_v1 or not allows_v0):
        return Interface(
            generation="verifiers-v1",
            module=module,
            extras=extras,
            requirements=("verifiers", "uv"),  # `uv` runs the harnesses of verifiers v1
            constraints=("verifiers>=0.4,<0.5",),
        )
    release = f"verifiers=={_V0_RELEASE}" if allows_v0 else "verifiers<0.4"
    return Interface(
        generation="verifiers-v0",
        module=module,
        extras=extras,
        requirements=("verifiers",),
        constraints=(release, "renderers<0.1.11", "openai<3", "mcp<2", "transformers<6"),
    )


def _entry_point(distribution: metadata.Distribution) -> str | None:
    """Return the loader that a distribution registers as an entry point."""
    entries = [entry for entry in distribution.entry_points if entry.group == ENTRY_POINT_GROUP]
    return entries[0].value if entries else None


def _requirements(distribution: metadata.Distribution) -> list[Requirement]:
    requirements = []
    for text in distribution.requires or []:
        try:
            requirements.append(Requirement(text))
        except InvalidRequirement:
            continue  # the installer reports the invalid requirement
    return requirements


def _extras_of(requirement: Requirement) -> list[str]:
    """Return the extras that require a package; empty if it is always required."""
    return re.findall(r"extra\s*==\s*['\"]([^'\"]+)['\"]", str(requirement.marker or ""))


def _module_name(distribution: metadata.Distribution) -> str:
    """Return the module with the name of the distribution, else its first module."""
    wanted = canonicalize_name(distribution.name).replace("-", "_")
    modules = sorted({_top_level_module(path) for path in _python_files(distribution)} - {""})
    if not modules:
        raise BuckeyeError(
            f"{distribution.name} {distribution.version} has no Python module", code="BK-ENV-LOAD"
        )
    return wanted if wanted in modules else modules[0]


def _top_level_module(path: metadata.PackagePath) -> str:
    """Return the top-level module of a path: `package` for `package/part.py` and `package.py`."""
    return path.parts[0].removesuffix(".py") if path.parts[0] != ".." else ""


def _python_files(distribution: metadata.Distribution) -> list[metadata.PackagePath]:
    return [path for path in distribution.files or [] if path.suffix == ".py"]


def _source_texts(distribution: metadata.Distribution) -> list[str]:
    files = [Path(str(path.locate())) for path in _python_files(distribution)]
    return [path.read_text("utf-8", errors="replace") for path in files if path.is_file()]
