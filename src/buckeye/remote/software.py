"""This version of Buckeye, and the versions of what it needs, for another machine."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import buckeye
from buckeye.distribution import DISTRIBUTION

_BUILDS = ("torch", "triton")  # one version has a build for every kind of machine
_METADATA = f"{DISTRIBUTION.replace('-', '_')}.dist-info"


def code_files() -> dict[str, bytes]:
    """The package as it is here, and what `importlib.metadata` must know of it: path -> content."""
    package = Path(buckeye.__file__).parent
    files = {
        f"{package.name}/{path.relative_to(package).as_posix()}": path.read_bytes()
        for path in sorted(package.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    }
    here = metadata.distribution(DISTRIBUTION)
    files[f"{_METADATA}/METADATA"] = (
        f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: {buckeye.__version__}\n".encode()
    )
    files[f"{_METADATA}/entry_points.txt"] = (here.read_text("entry_points.txt") or "").encode()
    return files


def pins(lines: Iterable[str]) -> list[str]:
    """`name==version` of everything that the requirements lead to and that is installed here. Builds for one
    kind of machine are left out."""
    found: dict[str, str] = {}
    queue = [Requirement(line) for line in lines]
    while queue:
        need = queue.pop()
        name = canonicalize_name(need.name)
        if name in found or name.startswith("nvidia-"):
            continue
        try:
            there = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        found[name] = there.version
        queue += [one for one in map(Requirement, there.requires or []) if _applies(one, need.extras)]
    return sorted(f"{name}=={version}" for name, version in found.items() if name not in _BUILDS)


def torch_version() -> str:
    """The version of torch here, without its build."""
    try:
        return metadata.version("torch").partition("+")[0]
    except metadata.PackageNotFoundError:
        return ""


def _applies(need: Requirement, extras: Iterable[str]) -> bool:
    return need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in ("", *extras))
