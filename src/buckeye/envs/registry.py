"""Lookup and construction of environments in this process.

An environment is a package with a function `load_environment(**args) -> Environment`. It is found, in this
order: as a path (starts with `.`, `/` or `~`, or ends in `.py`); among those bundled with Buckeye, unless
installed; by the entry-point group `buckeye.environments`; by importing the module of its name; as a folder
of that name.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import logging
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from buckeye.config.problems import closest
from buckeye.envs.base import Environment
from buckeye.envs.outcome_validation import missing_variable_hint
from buckeye.errors import THIRD_PARTY_ERRORS, BuckeyeError, EnvironmentNotFoundError, UsageError

ENTRY_POINT_GROUP = "buckeye.environments"
_HUB_INDEX = "https://hub.primeintellect.ai/{owner}/simple/"
_ID = re.compile(
    r"(?:(?P<owner>[A-Za-z0-9][\w.-]*)/)?(?P<name>[A-Za-z0-9][\w.-]*)(?:@(?P<version>[^@/]+))?", re.ASCII
)
_PROTOCOL = ("name", "tasks", "rollout")
LIBRARIES = {"reasoning-gym": "reasoning_gym", "textarena": "textarena"}
"""Libraries that provide environments, `reasoning-gym/NAME`, with the module of each."""
AGENT = "agent"
"""Id of the environment for any program that calls a model; its tasks and its command are arguments."""

_BUNDLED = "dakota1890"
_BUNDLES = (Path(__file__).with_name("bundled"), Path(__file__).parents[3] / "environments")
"""Folders of bundled environments: in the package, or in the checkout."""

_Loader = TypeVar("_Loader", bound=Callable[..., Any])
_FORMER_ARGUMENTS = "former_arguments"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EnvironmentId:
    """Parts of `owner/name@version`; owner and version are optional."""

    owner: str | None
    name: str
    version: str | None

    @classmethod
    def parse(cls, text: str) -> EnvironmentId:
        """Parse an id. Raise `UsageError` for any other text."""
        match = _ID.fullmatch(text)
        if match is None:
            raise UsageError(
                f"{text!r} is not an environment id. Write NAME, OWNER/NAME, OWNER/NAME@VERSION, "
                f"or the path of a project folder or a .py file."
            )
        return cls(match["owner"], match["name"], match["version"])

    def __str__(self) -> str:
        owner = f"{self.owner}/" if self.owner else ""
        return f"{owner}{self.name}" + (f"@{self.version}" if self.version else "")

    @property
    def module(self) -> str:
        """Name of the module."""
        return self.name.replace("-", "_").replace(".", "_")


@dataclass(frozen=True, slots=True)
class _Found:
    """Loader, and the version of its distribution if known."""

    loader: Callable[..., Any]
    version: str | None


def renamed_arguments(names: Mapping[str, str]) -> Callable[[_Loader], _Loader]:
    """Return a decorator for a loader that also accepts former names of arguments; `names` maps former ->
    current.

    The loader raises `UsageError` for an argument given under both names.
    """

    def decorated(loader: _Loader) -> _Loader:
        @functools.wraps(loader)
        def load(*args: Any, **named: Any) -> Any:
            return loader(*args, **current_arguments(load, named))

        setattr(load, _FORMER_ARGUMENTS, names)
        return load  # type: ignore[return-value]

    return decorated


def current_arguments(loader: Callable[..., Any], args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments under their current names. Raise `UsageError` for one given under both names."""
    names: Mapping[str, str] = getattr(loader, _FORMER_ARGUMENTS, {})
    for former, current in names.items():
        if former in args and current in args:
            raise UsageError(
                f"{former} is the former name of {current}, and both are given: leave {former} out"
            )
    return {names.get(name, name): value for name, value in args.items()}


def build_environment(env_id: str, loader: Callable[..., Any], args: Mapping[str, Any]) -> Any:
    args = current_arguments(loader, args)
    _check_arguments(env_id, loader, args)
    try:
        return loader(**args)
    except BuckeyeError:
        raise
    except THIRD_PARTY_ERRORS as error:
        what = f"{type(error).__name__}: {error}."
        hint = missing_variable_hint(what, ())
        raise UsageError(
            f"environment {env_id!r} could not be built with {args or 'no arguments'}: {what}"
            + (f"\n{hint}" if hint else "")
        ) from error


def missing_members(environment: Any) -> list[str]:
    return [member for member in _PROTOCOL if not hasattr(environment, member)]


def check_environment(env_id: str, environment: Any) -> Environment:
    if missing := missing_members(environment):
        raise UsageError(
            f"load_environment of {env_id!r} returned a {type(environment).__name__}, which is no Buckeye "
            f"environment: it has no {', '.join(missing)}. See buckeye.envs.base.Environment."
        )
    return environment  # type: ignore[no-any-return]


def installed_environments() -> list[str]:
    """Return the names of the registered environments, sorted."""
    return sorted({entry.name for entry in metadata.entry_points(group=ENTRY_POINT_GROUP)})


def is_file_id(env_id: str) -> bool:
    """Return True if an environment id is a path, not OWNER/NAME."""
    return env_id.startswith((".", "/", "~")) or env_id.endswith(".py")


def find_local_loader(env_id: str) -> Callable[..., Any] | None:
    """Return the loader of an environment that can be imported in this process, or None. Raise `UsageError`
    if the import fails.
    """
    if env_id == AGENT or env_id.partition("/")[0] in LIBRARIES:
        return None
    path = Path(env_id).expanduser()
    if is_file_id(env_id):
        return _from_path(path)
    wanted, bundle = EnvironmentId.parse(env_id), find_bundled_project(env_id)
    found: _Found | None
    if bundle is not None and not path.is_dir():
        project = tomllib.loads((bundle / "pyproject.toml").read_text("utf-8"))["project"]
        found = _Found(_from_path(bundle), str(project["version"]))
    else:
        found = _from_entry_point(wanted) or _from_module(wanted)
    if found is not None:
        _check_version(wanted, found.version)
        return found.loader
    return _from_path(path) if path.is_dir() else None


def find_bundled_project(env_id: str) -> Path | None:
    """Return the project of an environment bundled with Buckeye. None for others, and if an installed
    distribution has its name.
    """
    if canonicalize_name(env_id.partition("@")[0].rpartition("/")[2]) != _BUNDLED:
        return None
    try:
        metadata.distribution(_BUNDLED)
    except metadata.PackageNotFoundError:
        return next((place / _BUNDLED for place in _BUNDLES if (place / _BUNDLED).is_dir()), None)
    return None


def _from_entry_point(wanted: EnvironmentId) -> _Found | None:
    for entry in metadata.entry_points(group=ENTRY_POINT_GROUP):
        if canonicalize_name(entry.name) == canonicalize_name(wanted.name):
            with _import_problems(f"the installed environment {entry.name!r}"):
                return _Found(entry.load(), entry.dist.version if entry.dist else None)
    return None


def _from_module(wanted: EnvironmentId) -> _Found | None:
    if importlib.util.find_spec(wanted.module) is None:
        return None
    with _import_problems(f"the module {wanted.module!r}"):
        module = importlib.import_module(wanted.module)
    loader = getattr(module, "load_environment", None)
    if loader is None:
        return None
    try:
        return _Found(loader, metadata.version(wanted.name))
    except metadata.PackageNotFoundError:
        return _Found(loader, getattr(module, "__version__", None))


def _check_version(wanted: EnvironmentId, installed: str | None) -> None:
    """Accept the requested version, or a newer release of the same x.y series. Raise `UsageError`
    otherwise.
    """
    if wanted.version in (None, "latest"):
        return
    try:
        asked = Version(str(wanted.version))
    except InvalidVersion:
        raise UsageError(
            f"{wanted.version!r} in {wanted.name}@{wanted.version} is not a version. "
            f"Write {wanted.name}@1.2.3 or {wanted.name}@latest."
        ) from None
    here = Version(installed) if installed else None
    if here == asked:
        return
    if here and here > asked and here.release[:2] == asked.release[:2]:
        log.info("%s %s is installed and serves for %s", wanted.name, here, asked)
        return
    have = f"{wanted.name} {here} is installed" if here else f"the version of {wanted.name} is not known"
    raise UsageError(f"{wanted.name}@{asked} is asked for, but {have}.\n{install_commands(wanted)}")


def install_commands(wanted: EnvironmentId) -> str:
    pinned = wanted.name if wanted.version in (None, "latest") else f"{wanted.name}=={wanted.version}"
    index = f" --extra-index-url {_HUB_INDEX.format(owner=wanted.owner)}" if wanted.owner else ""
    return (
        f"Install it with:\n"
        f"  buckeye env install {wanted}\n"
        f"or, into this interpreter:\n"
        f"  uv pip install {pinned}{index}"
    )


def _check_arguments(env_id: str, loader: Callable[..., Any], args: Mapping[str, Any]) -> None:
    """Raise `UsageError` for an argument that the loader does not take, or for a missing required one."""
    parameters = inspect.signature(loader).parameters.values()
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    accepted = ", ".join(named) or "none"
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for name in args:
            if name not in named:
                close = closest(name, named, count=1)
                meant = f" Did you mean {close[0]!r}?" if close else ""
                raise UsageError(
                    f"environment {env_id!r} takes no argument {name!r}.{meant} It takes: {accepted}."
                )
    needed = [name for name, p in named.items() if p.default is p.empty and name not in args]
    if needed:
        raise UsageError(f"environment {env_id!r} needs the argument {needed[0]!r}. It takes: {accepted}.")


def _from_path(path: Path) -> Callable[..., Any]:
    if not path.exists():
        raise EnvironmentNotFoundError(f"there is no environment at {path}: the path does not exist.")
    with _import_problems(f"the environment at {path}"):
        if path.is_file():
            module, attribute = _import_file(path), "load_environment"
        else:
            name, attribute = _entry_of_project(path)
            module = _import_from_project(path, name)
    loader = getattr(module, attribute, None)
    if not callable(loader):
        raise UsageError(f"{path} defines no function {attribute}(**args) that returns an environment.")
    return loader  # type: ignore[no-any-return]


def _import_file(path: Path) -> ModuleType:
    name = f"buckeye_local_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file. Give a .py file or a project folder.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _entry_of_project(folder: Path) -> tuple[str, str]:
    """Return the module and attribute that a project registers, or its name and `load_environment`."""
    project_file = folder / "pyproject.toml"
    if not project_file.is_file():
        return folder.resolve().name.replace("-", "_"), "load_environment"
    try:
        project = tomllib.loads(project_file.read_text("utf-8")).get("project", {})
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{project_file} is not valid TOML: {error}.") from None
    announced = project.get("entry-points", {}).get(ENTRY_POINT_GROUP, {})
    if announced:
        module, _, attribute = next(iter(announced.values())).partition(":")
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
                    f"{module} at {folder} is hidden by the one already imported from {imported.__file__}."
                )
            return imported
    raise UsageError(f"{folder} has no module {top!r}: looked for {top}/ and {top}.py there and in src/.")


@contextmanager
def _import_problems(what: str) -> Iterator[None]:
    """Convert any error of importing third-party code to a `UsageError`."""
    try:
        yield
    except BuckeyeError:
        raise
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{what} needs the module {error.name!r}, which is not installed. Install it first."
        ) from error
    except THIRD_PARTY_ERRORS as error:
        raise UsageError(f"{what} could not be imported: {type(error).__name__}: {error}.") from error
