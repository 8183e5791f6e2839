"""Read the requirements of the installed Buckeye, and make the command that installs a missing package."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import platform
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from copy import copy
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from buckeye.errors import UsageError

DISTRIBUTION = "buckeye-rl"
"""Name of Buckeye in package indexes. There, the name `buckeye` belongs to an unrelated package."""
CODE_FOLDER = str(Path(__file__).parents[1])
"""Folder with the code of the package `buckeye`."""

_COMMON_EXTRAS = ("hub", "mcp", "remote", "train")
_LIBRARIES = (DISTRIBUTION, "torch", "transformers", "peft", "vllm")
_EXTRA = re.compile(r"""(?: and )?extra == ["']([^"']+)["']""")
_CPU_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"


def need(module: str, what: str) -> None:
    """Raise `UsageError`, with the install command, if `what` needs a module that is not installed."""
    if importlib.util.find_spec(module) is None:
        raise missing(module, what) or AssertionError(f"{module} is in no extra of {DISTRIBUTION}")


def missing(module: str, what: str) -> UsageError | None:
    """Return the error for a missing module, or None if no extra of Buckeye installs the module."""
    extra = _extra_with(module)
    if extra is None:
        return None
    return UsageError(
        f"{what} requires {module}, of the extra `{extra}`",
        code="BK-PACKAGE-MISSING",
        hint=f"install it: {install_command(extra)}",
    )


def install_command(*extras: str) -> str:
    """Return the command that adds extras to this installation.

    The command uses the source of the installation: a checkout, a file or an index.
    """
    bracket = f"[{','.join(extras)}]"
    try:
        direct_url = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    except metadata.PackageNotFoundError:  # Buckeye is not installed; its source is in sys.path
        direct_url = None
    origin = json.loads(direct_url or "{}")
    if "dir_info" in origin:
        editable = ["-e"] if origin["dir_info"].get("editable") else []
        requirement = [*editable, unquote(urlsplit(origin["url"]).path) + bracket]
    elif "vcs_info" in origin:
        vcs = origin["vcs_info"]
        requirement = [f"{DISTRIBUTION}{bracket} @ {vcs['vcs']}+{origin['url']}@{vcs['commit_id']}"]
    elif "url" in origin:
        requirement = [f"{DISTRIBUTION}{bracket} @ {origin['url']}"]
    else:
        requirement = [DISTRIBUTION + bracket]
    return shlex.join([*_installer(), *requirement])


def cpu_torch_command(*flags: str) -> str:
    """Return the command that installs the build of torch without CUDA, which is smaller."""
    installer = _installer()
    build = ["--torch-backend=cpu"] if installer[0] == "uv" else ["--index-url", _CPU_TORCH_INDEX]
    return shlex.join([*installer, *flags, "torch", *build])


def requirements(extras: Iterable[str]) -> list[str]:
    """Return the requirements of Buckeye with these extras, as lines such as `torch>=2.6`.

    Extras in these extras are included.
    """
    base, optional = _declared_requirements()
    extra_lines = [line for extra in extras for line in optional.get(extra, [])]
    return sorted(_expand([*base, *extra_lines], optional))


def versions() -> dict[str, str]:
    """Return the versions of Python, Buckeye and the libraries that run models."""
    result = {"Python": platform.python_version()}
    for name in _LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            result[name] = metadata.version(name)
    return result


def code_digest() -> str:
    """Return twelve hexadecimal digits that identify the code of Buckeye, independent of its version."""
    digest, folder = hashlib.sha256(), Path(CODE_FOLDER)
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _expand(lines: Iterable[str], optional: dict[str, list[str]]) -> set[str]:
    """Return the lines, with each line such as `buckeye-rl[train]` replaced by the lines of the extra."""
    queue, expanded, seen = list(lines), set(), set()
    while queue:
        if (line := queue.pop()) in seen:
            continue
        seen.add(line)
        requirement = Requirement(line)
        name = canonicalize_name(requirement.name)
        if name == DISTRIBUTION:
            queue += [other for extra in requirement.extras for other in optional.get(extra, [])]
        else:
            expanded.add(line)
    return expanded


def _extra_with(module: str) -> str | None:
    """Return the extra that installs a module, or None. Of several extras, common ones are preferred.

    The distribution of the module must have the name of the module.
    """
    _, optional = _declared_requirements()
    for extra in sorted(
        optional, key=lambda extra: _COMMON_EXTRAS.index(extra) if extra in _COMMON_EXTRAS else 9
    ):
        names = {canonicalize_name(Requirement(line).name) for line in _expand(optional[extra], optional)}
        if extra != "dev" and canonicalize_name(module) in names:
            return extra
    return None


def _installer() -> list[str]:
    """Return the command that installs packages for this interpreter, also if its venv is not active."""
    if importlib.util.find_spec("pip") is None:
        return ["uv", "pip", "install", "--python", sys.executable]
    pip = shutil.which("pip")
    if pip is not None and Path(pip).parent == Path(sys.executable).parent:
        return ["pip", "install"]
    return [sys.executable, "-m", "pip", "install"]


def _declared_requirements() -> tuple[list[str], dict[str, list[str]]]:
    """Return the requirements of Buckeye, and the additional requirements of each extra."""
    try:
        distribution = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return [], {}
    lines = [Requirement(line) for line in distribution.requires or []]
    return list(_extra_requirements(lines, None)), {
        extra: list(_extra_requirements(lines, extra))
        for extra in distribution.metadata.get_all("Provides-Extra", [])
    }


def _extra_requirements(lines: Iterable[Requirement], extra: str | None) -> Iterator[str]:
    """Yield the requirements of an extra. If `extra` is None, yield the requirements without an extra.

    The lines keep their conditions on the platform, because another machine may evaluate them.
    """
    for line in lines:
        marker = str(line.marker or "")
        match = _EXTRA.search(marker)
        if extra == (match and match[1]):
            condition = _EXTRA.sub("", marker).removeprefix(" and ")
            requirement = copy(line)
            requirement.marker = Marker(condition) if condition else None
            yield str(requirement)
