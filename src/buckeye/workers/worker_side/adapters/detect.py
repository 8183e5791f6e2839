"""Choice of the adapter for an environment."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import ModuleType

from . import agent, buckeye_environment
from .base import Adapter, AdapterError, Json
from .bfcl import BFCL
from .gymnasium import Gymnasium
from .hud import HUD
from .inspect_ai import InspectAI
from .openenv import OpenEnv
from .ors_sdk import ORS
from .reasoning_gym import ReasoningGym
from .skyrl_gym import SkyRLGym
from .textarena import TextArena
from .verifiers_v0 import VerifiersV0
from .verifiers_v1 import VerifiersV1

V0_SET = "verifiers==0.3.1 renderers==0.1.10 'openai<3' 'mcp<2'"
V1_SET = "'verifiers>=0.4,<0.5'"
LIBRARIES: dict[str, Callable[[str, Json], Adapter]] = {
    "reasoning-gym": ReasoningGym,
    "textarena": TextArena,
    "gymnasium": Gymnasium,
    "skyrl-gym": SkyRLGym,
    "inspect-ai": InspectAI,
    "openenv": OpenEnv,
    "bfcl-eval": BFCL,
    "ors-sdk": ORS,
    "openreward": ORS,
    "hud": HUD,
}
"""Adapter of each library with environments. Their ids are LIBRARY/NAME."""


def load(env_id: str, args: Json, context: Json) -> Adapter:
    """Load the environment `env_id`, built with `args`. `context["module"]` names its module, if known.

    Raises AdapterError for an unknown environment, wrong arguments, and an environment that this interpreter
    cannot run.
    """
    programs = os.path.dirname(sys.executable)  # programs installed with the environment come first
    os.environ["PATH"] = os.pathsep.join([programs, os.environ.get("PATH", os.defpath)])
    try:
        return _load(env_id, dict(args), context)
    except ModuleNotFoundError as error:
        raise AdapterError(
            f"{env_id} needs the module {error.name!r}, which is not installed in {sys.executable}. "
            f"{_interpreter_hint(env_id)}"
        ) from error


def _load(env_id: str, args: Json, context: Json) -> Adapter:
    if env_id == agent.ID:
        return agent.Agent(env_id, args)
    library, slash, _ = env_id.partition("/")
    if slash and library in LIBRARIES:
        return LIBRARIES[library](env_id, args)
    if buckeye_environment.has_entry_point(env_id):
        return buckeye_environment.BuckeyeEnvironment.load(env_id, args)
    module = import_module(env_id, context.get("module"))
    if buckeye_environment.is_written_for_buckeye(module):
        return buckeye_environment.BuckeyeEnvironment.load(env_id, args)
    if generation(env_id, module) == "verifiers-v1":
        return VerifiersV1(env_id, module, args)
    return VerifiersV0(env_id, module, args)


def import_module(env_id: str, named: str | None = None) -> ModuleType:
    """Import the module `named`, or that of `owner/name@version`, of a project folder, or of a Python file.

    Raises ModuleNotFoundError if a module is missing, and AdapterError for any other error of the import.
    """
    path = Path(os.path.expanduser(env_id))
    is_local = (
        named is None and path.exists() and (path.suffix == ".py" or env_id.startswith((".", "/", "~")))
    )
    if is_local:
        name, root = _local_module(path.resolve())
        sys.path.insert(0, str(root))
        python_path = os.environ.get("PYTHONPATH")  # for tool servers that the environment starts
        os.environ["PYTHONPATH"] = os.pathsep.join([str(root), *([python_path] if python_path else [])])
    else:
        name = env_id.rsplit("/", 1)[-1].partition("@")[0].replace("-", "_").replace(".", "_")
    wanted = named or name
    if not is_local and importlib.util.find_spec(wanted) is None and importlib.util.find_spec(wanted.lower()):
        wanted = wanted.lower()
    try:
        return importlib.import_module(wanted)
    except ModuleNotFoundError:
        raise
    except Exception as error:
        raise AdapterError(_import_problem(env_id, error)) from error


def _local_module(path: Path) -> tuple[str, Path]:
    """Return the module name of a file or project folder, and the folder to import it from."""
    if path.is_file():
        return path.stem, path.parent
    name = path.name.replace("-", "_")
    for root in (path / "src", path):
        if (root / name).is_dir() or (root / f"{name}.py").is_file():
            return name, root
    raise AdapterError(f"{path} has no module {name}: add {name}.py or {name}/ to it or to its src/")


def generation(env_id: str, module: ModuleType) -> str:
    """Return `verifiers-v0` or `verifiers-v1`: the generation that the module supports and that is installed.

    Raises AdapterError if the module supports no generation, or only one that is not installed.
    """
    installed = _verifiers_version()
    runnable = None if installed is None else "verifiers-v1" if installed >= (0, 4) else "verifiers-v0"
    supported = _supported_generations(env_id, module, runnable)
    if not supported:
        raise AdapterError(
            f"{env_id} has no environment: its module {module.__name__} has no `load_environment` (verifiers "
            f"v0) and no Taskset in `__all__` (verifiers v1)"
        )
    if runnable in supported:
        return runnable
    wanted = supported[0]
    present = f"verifiers {metadata.version('verifiers')} is" if installed else "verifiers is not"
    needs = V1_SET if wanted == "verifiers-v1" else V0_SET
    raise AdapterError(
        f"{env_id} requires {wanted}, but {present} installed in {sys.executable}. Requirements: {needs}. "
        f"{_interpreter_hint(env_id)}"
    )


def _interpreter_hint(env_id: str) -> str:
    """Return a hint on how to get an interpreter that has an environment and its dependencies."""
    return (
        f"Run `buckeye env install {env_id}` (--with NAME adds a package, --force replaces an installation), "
        "or set `python` in its [[env]] table to an interpreter that has the environment"
    )


def _supported_generations(env_id: str, module: ModuleType, runnable: str | None) -> list[str]:
    """Return the generations that a module supports.

    If the installed verifiers cannot run v1, only check the names in `__all__`: accessing a Taskset may
    import missing modules.
    """
    supported = ["verifiers-v0"] if callable(getattr(module, "load_environment", None)) else []
    names = getattr(module, "__all__", None)
    if not isinstance(names, (list, tuple)):
        return supported
    if runnable != "verifiers-v1":
        return supported + (["verifiers-v1"] if any("Taskset" in str(name) for name in names) else [])
    base = importlib.import_module("verifiers.v1").Taskset
    exported = [getattr(module, name, None) for name in names]
    tasksets = [cls for cls in exported if inspect.isclass(cls) and issubclass(cls, base) and cls is not base]
    return [*supported, "verifiers-v1"] if tasksets else supported


def _verifiers_version() -> tuple[int, int] | None:
    try:
        parts = metadata.version("verifiers").split(".")
        return int(parts[0]), int(parts[1])
    except (metadata.PackageNotFoundError, ValueError, IndexError):
        return None


def _import_problem(env_id: str, error: Exception) -> str:
    """Return the message for a failed import. Usually, the module needs the other generation of verifiers."""
    message = f"cannot import {env_id}: {type(error).__name__}: {error}"
    installed = _verifiers_version()
    if installed is None or "verifiers" not in str(error):
        return message
    other = V0_SET if installed >= (0, 4) else V1_SET
    return (
        f"{message}. verifiers {metadata.version('verifiers')} is installed in {sys.executable}; it may "
        f"require: {other}. {_interpreter_hint(env_id)}"
    )
