"""This version of Buckeye and what it needs, as far as another machine must know it."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import buckeye

EXTRAS = ("train", "mcp")
_NAME = "buckeye"
_BUILDS = ("torch", "triton")  # one version has a build for every kind of machine
_METADATA = "buckeye.dist-info"


def code_files() -> dict[str, bytes]:
    """The package as it is here, and what `importlib.metadata` must know of it: path -> content."""
    package = Path(buckeye.__file__).parent
    files = {
        f"{_NAME}/{path.relative_to(package).as_posix()}": path.read_bytes()
        for path in sorted(package.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    }
    here = metadata.distribution(_NAME)
    files[f"{_METADATA}/METADATA"] = (
        f"Metadata-Version: 2.1\nName: {_NAME}\nVersion: {buckeye.__version__}\n".encode()
    )
    files[f"{_METADATA}/entry_points.txt"] = (here.read_text("entry_points.txt") or "").encode()
    return files


def requirements(extras: Sequence[str] = EXTRAS) -> list[str]:
    """What the package needs with some extras, without itself; of a source tree from its pyproject.toml."""
    base, optional = _declared()
    wanted, seen = list(base), set()
    queue = list(extras)
    while queue:
        extra = queue.pop()
        if extra in seen:
            continue
        seen.add(extra)
        for line in optional.get(extra, []):
            need = Requirement(line)
            if canonicalize_name(need.name) == _NAME:
                queue += need.extras
            else:
                wanted.append(line)
    return sorted(set(wanted))


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


def _declared() -> tuple[list[str], dict[str, list[str]]]:
    project = Path(buckeye.__file__).parents[2] / "pyproject.toml"
    if project.is_file():
        values = tomllib.loads(project.read_text(encoding="utf-8")).get("project", {})
        if values.get("name") == _NAME:
            return values["dependencies"], values["optional-dependencies"]
    lines = [Requirement(line) for line in metadata.requires(_NAME) or []]
    return list(_of_extra(lines, None)), {
        extra: list(_of_extra(lines, extra))
        for extra in metadata.metadata(_NAME).get_all("Provides-Extra", [])
    }


def _of_extra(lines: Iterable[Requirement], extra: str | None) -> Iterator[str]:
    for line in lines:
        always = line.marker is None or line.marker.evaluate({"extra": ""})
        if extra is None and always:
            yield str(line)
        elif extra is not None and not always and line.marker and line.marker.evaluate({"extra": extra}):
            line.marker = None
            yield str(line)
