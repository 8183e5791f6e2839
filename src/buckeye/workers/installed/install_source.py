"""Parser of an install request: an environment of the hub, a project, or a package."""

from __future__ import annotations

import os
import re
import tomllib
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

from buckeye.errors import UsageError

HUB_INDEX = "https://hub.primeintellect.ai/{owner}/simple/"
LIBRARIES = ("reasoning-gym", "textarena")
"""Libraries with many environments, each with the id LIBRARY/NAME."""

WITHOUT_ADAPTER = ("nemo-gym", "openenv", "openenv-core", "skyrl-gym", "inspect-ai", "gymnasium")
"""Libraries whose environments cannot be loaded by name."""

_EXTRAS = re.compile(r"(?P<what>.*?)\[(?P<extras>[\w.\- ,]*)\](?P<rest>[^\[\]/]*)")
_HUB_ID = re.compile(
    r"(?P<owner>[A-Za-z0-9][\w.-]*)/(?P<name>[A-Za-z0-9][\w.-]*?)(?:(?:@|==)(?P<version>[^@/=]+))?", re.ASCII
)
_ARCHIVES = (".whl", ".tar.gz", ".zip")


@dataclass(frozen=True, kw_only=True, slots=True)
class InstallSource:
    """Source of an environment.

    `name` is canonical. `specifier` is its version, such as "==0.1.12" or "". `path` is a local project or
    archive. `index` is the only package index for the environment itself; None means the default index.
    """

    kind: Literal["hub", "path", "package"]
    text: str
    name: str
    owner: str | None = None
    specifier: str = ""
    extras: tuple[str, ...] = ()
    path: Path | None = None
    index: str | None = None

    @property
    def requirement(self) -> str:
        """Requirement for the installer."""
        extras = f"[{','.join(self.extras)}]" if self.extras else ""
        return f"{self.path}{extras}" if self.path is not None else f"{self.name}{extras}{self.specifier}"

    @property
    def env_id(self) -> str:
        """Id of the environment in a configuration."""
        return f"{self.owner}/{self.name}" if self.owner else self.name


def parse_source(text: str, index: str | None = None) -> InstallSource:
    """Parse a path, OWNER/NAME[@VERSION] or PACKAGE[==VERSION], each with optional [EXTRAS].

    Raises UsageError for anything else, and for an index URL with a password.
    """
    _check_index(index)
    if "\0" in text:  # no path may contain it
        raise _names_none(text)
    match = _EXTRAS.fullmatch(text)
    what = f"{match['what']}{match['rest']}" if match else text
    extras = tuple(e.strip() for e in match["extras"].split(",") if e.strip()) if match else ()
    path = Path(os.path.expanduser(what))  # `~user` stays unchanged for an unknown user
    if _is_meant_as_path(what, path):
        return InstallSource(
            kind="path", text=text, name=_name_of(path), extras=extras, path=path.absolute(), index=index
        )
    hub = _HUB_ID.fullmatch(what)
    if hub is not None and canonicalize_name(hub["owner"]) in LIBRARIES:
        return InstallSource(kind="package", text=text, name=canonicalize_name(hub["owner"]), index=index)
    if hub is not None and index is None and (instead := unsupported_library_hint(hub["owner"])):
        raise UsageError(instead)
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
    return _package(what, text, extras, index)


def unsupported_library_hint(name: str) -> str | None:
    """Return advice for a library whose environments cannot be loaded by name, else None."""
    library = canonicalize_name(name)
    if library not in WITHOUT_ADAPTER:
        return None
    return (
        f"{library} is a library whose environments Buckeye cannot load by their names. A program can play "
        'them: id = "agent", with a command that plays one task with the model at OPENAI_BASE_URL and prints '
        "its reward, run by a `python` that has the library (docs/how-to/agents.md, Any agent). Or "
        "write an environment around it: buckeye env new NAME --kind python"
    )


def _package(what: str, text: str, extras: tuple[str, ...], index: str | None) -> InstallSource:
    name, at, version = what.partition("@")
    try:
        requirement = Requirement(f"{name}=={version}" if at and version != "latest" else name)
    except InvalidRequirement:
        raise _names_none(text) from None
    if instead := unsupported_library_hint(requirement.name):
        raise UsageError(instead)
    return InstallSource(
        kind="package",
        text=text,
        name=canonicalize_name(requirement.name),
        specifier=str(requirement.specifier),
        extras=extras,
        index=index,
    )


def _names_none(text: str) -> UsageError:
    return UsageError(
        f"{text!r} names no environment. Write OWNER/NAME[@VERSION], PACKAGE[==VERSION], or the path "
        "of a project folder or a wheel."
    )


def _is_meant_as_path(what: str, path: Path) -> bool:
    if not what:
        return False
    if what.startswith((".", "/", "~")) or what.endswith(_ARCHIVES):
        return True
    return (path / "pyproject.toml").is_file() or (path / "setup.py").is_file()


def _name_of(path: Path) -> str:
    """Return the name of the distribution at a path. Raises UsageError."""
    if not path.exists():
        raise UsageError(f"there is no environment at {path}: the path does not exist.")
    if path.is_file():
        return _name_of_archive(path)
    project = path / "pyproject.toml"
    try:
        name = tomllib.loads(project.read_text("utf-8")).get("project", {}).get("name")
    except FileNotFoundError:
        name = None
    except (OSError, ValueError) as error:
        raise UsageError(f"{project} cannot be read: {error}") from None
    if not isinstance(name, str):
        raise UsageError(f"{path} is no project that can be installed: it has no pyproject.toml with a name.")
    return canonicalize_name(name)


def _name_of_archive(path: Path) -> str:
    try:
        if path.suffix == ".whl":
            return parse_wheel_filename(path.name)[0]
        return parse_sdist_filename(path.name)[0]
    except (InvalidWheelFilename, InvalidSdistFilename):
        raise UsageError(
            f"{path} cannot be installed: give a project folder, a wheel (.whl) or a source archive "
            "(.tar.gz)."
        ) from None


def _check_index(index: str | None) -> None:
    if index is None:
        return
    parts = urlsplit(index)
    if parts.scheme not in ("http", "https", "file"):
        raise UsageError(f"--index {index}: write the URL of a package index, as https://host/simple/")
    if "@" in parts.netloc:
        raise UsageError(
            "--index: a password or a token on a command line is seen by everybody on this machine. Put it "
            "into ~/.netrc and leave it out of the URL."
        )
