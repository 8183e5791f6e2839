"""Find environments by id, and build them in this process.

An environment is a package with a function `load_environment(**args) -> Environment`. The first match of an
id wins:

1. a path: the id starts with `.`, `/` or `~`, or ends in `.py`
2. an environment that Buckeye contains, unless a distribution of this name is installed
3. a name in the entry-point group `buckeye.environments`
4. an importable module
5. a folder
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from buckeye.base.distribution import CODE_FOLDER
from buckeye.base.user_function import import_file
from buckeye.config.config_files import hint_for_missing_file, read_project
from buckeye.config.problems import closest
from buckeye.envs.base import Environment
from buckeye.envs.outcome_validation import missing_variable_hint
from buckeye.envs.stdlib_only.outcomes import author_frames, frames_of
from buckeye.errors import (
    DEBUG_VARIABLE,
    THIRD_PARTY_ERRORS,
    BuckeyeError,
    EnvironmentNotFoundError,
    UsageError,
)

ENTRY_POINT_GROUP = "buckeye.environments"
_HUB_INDEX = "https://hub.primeintellect.ai/{owner}/simple/"
_ID = re.compile(
    r"(?:(?P<owner>[A-Za-z0-9][\w.-]*)/)?(?P<name>[A-Za-z0-9][\w.-]*)(?:@(?P<version>[^@/]+))?", re.ASCII
)
_PROTOCOL = ("name", "tasks", "rollout")
LIBRARIES = {
    "reasoning-gym": "reasoning_gym",
    "textarena": "textarena",
    "gymnasium": "gymnasium",
    "skyrl-gym": "skyrl_gym",
    "inspect-ai": "inspect_ai",
    "openenv": "openenv",
    "bfcl-eval": "bfcl_eval",
    "ors-sdk": "ors",
    "openreward": "openreward",
    "hud": "hud",
}
"""Module of each library with environments. Their ids are LIBRARY/NAME."""
AGENT = "agent"
"""Id of the environment whose rollouts run a program of the user. Its arguments are a command and tasks."""

CALLER = "caller"
"""Id of an environment object that the user passed to the Python API. It is in the process of the caller."""
CALLER_FILE = "caller.json"
"""File in a run directory with the arguments of an environment that a Python process served."""

_BUNDLED = "dakota1890"
_BUNDLE_FOLDERS = (Path(__file__).with_name("bundled"), Path(__file__).parents[3] / "environments")
"""Folders with the environments that Buckeye contains: in the package, and in a checkout."""

_VersionedLoader = tuple[Callable[..., Any], str | None]
"""Loader of an environment, and the version of its distribution, if known."""
_TRACEBACK_HINT = f"set {DEBUG_VARIABLE}=1 to see the traceback"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EnvironmentId:
    """Parts of an environment id `owner/name@version`. Owner and version are optional."""

    owner: str | None
    name: str
    version: str | None

    @classmethod
    def parse(cls, text: str) -> EnvironmentId:
        """Parse an id. Raise `UsageError` for any other text."""
        match = _ID.fullmatch(text)
        library, _, name = text.partition("/")
        if match is None and library in LIBRARIES and name:
            return cls(library, name, None)
        if match is None:
            raise UsageError(
                f"{text!r} is not an environment id",
                code="BK-ENV-UNKNOWN",
                hint="write NAME, OWNER/NAME, OWNER/NAME@VERSION, or the path of a project or .py file",
            )
        return cls(match["owner"], match["name"], match["version"])

    def __str__(self) -> str:
        owner = f"{self.owner}/" if self.owner else ""
        return f"{owner}{self.name}" + (f"@{self.version}" if self.version else "")

    @property
    def module(self) -> str:
        """Name of the Python module of the environment."""
        return self.name.replace("-", "_").replace(".", "_")


def build_environment(env_id: str, loader: Callable[..., Any], args: Mapping[str, Any]) -> Any:
    """Return the result of `loader(**args)`. Raise `UsageError` if the call fails or an argument is wrong."""
    _check_arguments(env_id, loader, args)
    try:
        return loader(**args)
    except BuckeyeError:
        raise
    except THIRD_PARTY_ERRORS as error:
        reason = f"{type(error).__name__}: {error}"
        raise UsageError(
            f"cannot build environment {env_id!r} with {args or 'no arguments'}: {reason}",
            code="BK-ENV-LOAD",
            hint=missing_variable_hint(reason, ()) or _TRACEBACK_HINT,
        ) from error


def missing_members(environment: Any) -> list[str]:
    """Return the members of the protocol `Environment` that an object lacks."""
    return [member for member in _PROTOCOL if not hasattr(environment, member)]


def check_environment(env_id: str, environment: Any) -> Environment:
    """Return `environment`. Raise `UsageError` if it lacks a member of the protocol `Environment`."""
    if missing := missing_members(environment):
        raise UsageError(
            f"`load_environment` of {env_id!r} returned an object of type {type(environment).__name__}, not "
            f"a Buckeye environment: it lacks {', '.join(f'`{name}`' for name in missing)}",
            code="BK-ENV-LOAD",
            hint="return an object with all members of `buckeye.envs.base.Environment`",
        )
    return environment  # type: ignore[no-any-return]


def installed_environments() -> list[str]:
    """Return the sorted names of all environments in the entry-point group."""
    return sorted({entry.name for entry in metadata.entry_points(group=ENTRY_POINT_GROUP)})


def is_file_id(env_id: str) -> bool:
    """Return True if an environment id is a path, not OWNER/NAME."""
    return env_id.startswith((".", "/", "~")) or env_id.endswith(".py")


def find_local_loader(env_id: str) -> Callable[..., Any] | None:
    """Return the loader of an environment, or None if this process has no importable environment of this id.

    Raise `UsageError` if the import fails.
    """
    if env_id in (AGENT, CALLER) or env_id.partition("/")[0] in LIBRARIES:
        return None
    path = Path(os.path.expanduser(env_id))
    if is_file_id(env_id):
        return _from_path(path)
    wanted, bundle = EnvironmentId.parse(env_id), find_bundled_project(env_id)
    found: _VersionedLoader | None
    if bundle is not None and not path.is_dir():
        project = tomllib.loads((bundle / "pyproject.toml").read_text("utf-8"))["project"]
        found = _from_path(bundle), str(project["version"])
    else:
        found = _from_entry_point(wanted) or _from_module(wanted)
    if found is not None:
        loader, version = found
        _check_version(wanted, version)
        return loader
    return _from_path(path) if path.is_dir() else None


def find_bundled_project(env_id: str) -> Path | None:
    """Return the project folder of an environment that Buckeye contains.

    Return None for any other environment, or if a distribution of this name is installed.
    """
    if canonicalize_name(env_id.partition("@")[0].rpartition("/")[2]) != _BUNDLED:
        return None
    try:
        metadata.distribution(_BUNDLED)
    except metadata.PackageNotFoundError:
        return next((place / _BUNDLED for place in _BUNDLE_FOLDERS if (place / _BUNDLED).is_dir()), None)
    return None


def _from_entry_point(wanted: EnvironmentId) -> _VersionedLoader | None:
    for entry in metadata.entry_points(group=ENTRY_POINT_GROUP):
        if canonicalize_name(entry.name) == canonicalize_name(wanted.name):
            with report_import_errors(f"the installed environment {entry.name!r}"):
                return entry.load(), entry.dist.version if entry.dist else None
    return None


def _from_module(wanted: EnvironmentId) -> _VersionedLoader | None:
    if importlib.util.find_spec(wanted.module) is None:
        return None
    with report_import_errors(f"the module {wanted.module!r}"):
        module = importlib.import_module(wanted.module)
    loader = getattr(module, "load_environment", None)
    if loader is None:
        return None
    try:
        return loader, metadata.version(wanted.name)
    except metadata.PackageNotFoundError:
        return loader, getattr(module, "__version__", None)


def _check_version(wanted: EnvironmentId, installed: str | None) -> None:
    """Raise `UsageError` unless the installed version is the requested version, or a newer x.y release.

    For example, 1.2.5 is installed and 1.2.3 is requested.
    """
    if wanted.version in (None, "latest"):
        return
    try:
        requested = Version(str(wanted.version))
    except InvalidVersion:
        raise UsageError(
            f"{wanted.name}@{wanted.version}: {wanted.version!r} is not a version",
            code="BK-ENV-UNKNOWN",
            hint=f"write {wanted.name}@1.2.3 or {wanted.name}@latest",
        ) from None
    try:
        current = Version(str(installed))
    except InvalidVersion:  # unknown, or a text such as "unknown"
        current = None
    if current == requested:
        return
    if current and current > requested and current.release[:2] == requested.release[:2]:
        log.info("using %s %s, which is compatible with the requested %s", wanted.name, current, requested)
        return
    reason = f"version {current} is installed" if current else "the installed version is unknown"
    raise UsageError(
        f"{wanted.name}@{requested} is not available: {reason}",
        code="BK-PACKAGE-VERSION",
        hint=install_commands(wanted),
    )


def install_commands(wanted: EnvironmentId) -> str:
    """Return a hint with the commands that install an environment."""
    pinned = wanted.name if wanted.version in (None, "latest") else f"{wanted.name}=={wanted.version}"
    index = f" --extra-index-url {_HUB_INDEX.format(owner=wanted.owner)}" if wanted.owner else ""
    return (
        f"install it with:\n"
        f"  buckeye env install {wanted}\n"
        f"or, into this interpreter:\n"
        f"  uv pip install {pinned}{index}"
    )


def _check_arguments(env_id: str, loader: Callable[..., Any], args: Mapping[str, Any]) -> None:
    """Raise `UsageError` for an unknown argument, or for a missing argument that the loader requires."""
    parameters = inspect.signature(loader).parameters.values()
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    accepted = ", ".join(named) or "none"
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for name in args:
            if name not in named:
                close = closest(name, named, count=1)
                suggestion = f"did you mean {close[0]!r}? " if close else ""
                raise UsageError(
                    f"environment {env_id!r} has no argument {name!r}",
                    code="BK-ENV-ARGUMENT",
                    hint=f"{suggestion}Arguments: {accepted}",
                )
    missing = [name for name, p in named.items() if p.default is p.empty and name not in args]
    if missing:
        raise UsageError(
            f"environment {env_id!r} needs the argument {missing[0]!r}",
            code="BK-ENV-ARGUMENT",
            hint=f"set it. Arguments: {accepted}",
        )


def _from_path(path: Path) -> Callable[..., Any]:
    if not path.exists():
        raise EnvironmentNotFoundError(
            f"no environment at {path}: the path does not exist", hint=hint_for_missing_file(path)
        )
    install = ""
    if (path / "pyproject.toml").is_file():
        command = f"buckeye env install {os.path.join('.', path)}"
        install = (
            f"install the environment with its packages, and use the id that this command prints: {command}"
        )
    folder = path.parent if path.is_file() else path
    with report_import_errors(f"the environment at {path}", folder, install=install):
        if path.is_file():
            module, attribute = import_file(path), "load_environment"
        else:
            name, attribute = _project_entry_point(path)
            module = _import_from_project(path, name)
    loader = getattr(module, attribute, None)
    if not callable(loader):
        raise UsageError(
            f"{path} has no function `{attribute}`",
            code="BK-ENV-LOAD",
            hint=f"define `{attribute}(**args)` there, and return an environment",
        )
    return loader  # type: ignore[no-any-return]


def _project_entry_point(folder: Path) -> tuple[str, str]:
    """Return module and function of a project's entry point. Default: its name and `load_environment`."""
    project_file = folder / "pyproject.toml"
    if not project_file.is_file():
        return folder.resolve().name.replace("-", "_"), "load_environment"
    project = read_project(project_file).get("project", {})
    entry_points = project.get("entry-points", {}).get(ENTRY_POINT_GROUP, {})
    if entry_points:
        module, _, attribute = next(iter(entry_points.values())).partition(":")
        return module, attribute or "load_environment"
    return str(project.get("name", folder.resolve().name)).replace("-", "_"), "load_environment"


def _import_from_project(folder: Path, module: str) -> ModuleType:
    """Import `module` from `folder/src` or `folder`, whichever contains it."""
    top = module.partition(".")[0]
    for root in (folder / "src", folder):
        if (root / top).is_dir() or (root / f"{top}.py").is_file():
            sys.path.insert(0, str(root.resolve()))
            imported = importlib.import_module(module)
            if root.resolve() not in Path(str(imported.__file__)).resolve().parents:
                raise UsageError(
                    f"cannot import `{module}` from {folder}: a module with this name is already imported "
                    f"from {imported.__file__}",
                    code="BK-ENV-LOAD",
                    hint="rename one of the two modules",
                )
            return imported
    raise UsageError(
        f"{folder} has no module {top!r}",
        code="BK-ENV-LOAD",
        hint=f"add {top}/ or {top}.py to the folder or to its src/",
    )


def _source_line(error: BaseException) -> str | None:
    """Return FILE:LINE of the innermost frame in the environment's code, or None without such a frame."""
    frames = [frame for frame in author_frames(frames_of(error)) if not frame.startswith(CODE_FOLDER)]
    return frames[-1].partition(" in ")[0] if frames else None


@contextmanager
def report_import_errors(subject: str, folder: Path | None = None, *, install: str = "") -> Iterator[None]:
    """Convert errors in the block, which imports third-party code, to a `UsageError`.

    `subject` names the code in the message. `folder` is the folder that should contain its modules. `install`
    is the hint for a missing module.
    """
    try:
        yield
    except BuckeyeError:
        raise
    except ModuleNotFoundError as error:
        place = f"neither in {folder.resolve()} nor installed" if folder is not None else "not installed"
        hint = "install the package of that module into this interpreter"
        if folder is not None:
            hint = f"put {str(error.name).partition('.')[0]}.py into that folder, or {hint}"
        raise UsageError(
            f"{subject} needs the module {error.name!r}, which is {place}",
            code="BK-PACKAGE-MISSING",
            at=_source_line(error),
            hint=install or hint,
        ) from error
    except SyntaxError as error:
        in_file = error.filename is not None and Path(error.filename).is_file()  # False for code of `eval`
        line = f"{error.filename}:{error.lineno}" if in_file else _source_line(error)
        raise UsageError(
            f"cannot import {subject}: {type(error).__name__}: {error.msg}",
            code="BK-ENV-LOAD",
            at=line,
            hint="fix this line" if line else _TRACEBACK_HINT,
        ) from error
    except THIRD_PARTY_ERRORS as error:
        raise UsageError(
            f"cannot import {subject}: {type(error).__name__}: {error}",
            code="BK-ENV-LOAD",
            at=_source_line(error),
            hint=_TRACEBACK_HINT,
        ) from error
