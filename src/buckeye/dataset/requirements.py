"""List the files and extras that a machine needs to run a dataset environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from modulefinder import ModuleFinder
from pathlib import Path
from typing import Any

from buckeye.dataset.built_in import is_built_in
from buckeye.dataset.environment import NAME

_PARQUET = ".parquet"


def is_dataset_environment(env_id: str) -> bool:
    """Return True if an id names the environment `dataset`."""
    return env_id.partition("@")[0] == NAME


def named_files(args: Mapping[str, Any]) -> list[str]:
    """Return the Python files, JSON Schemas and files of judges that rewards name, with unchanged paths."""
    files = []
    for spec in _rewards(args):
        before, sign, _ = spec.partition(".py:")
        if sign or spec.endswith(".py"):
            files.append(f"{before}.py" if sign else spec)
        elif spec.startswith(("json:", "judge:")):
            files.append(spec.partition(":")[2])
    return files


def imported_files(args: Mapping[str, Any]) -> list[Path]:
    """Return the modules that reward files import from their own folder, also indirectly."""
    found: dict[Path, None] = {}
    for name in named_files(args):
        file = Path(os.path.expanduser(name)).absolute()
        if file.suffix != ".py" or not file.is_file():
            continue
        finder = ModuleFinder(path=[str(file.parent)])
        try:
            finder.run_script(str(file))
        except (SyntaxError, OSError, ValueError):  # loading the environment reports this error
            continue
        names = [getattr(module, "__file__", None) for module in finder.modules.values()]
        found |= dict.fromkeys(path for path in map(Path, filter(None, names)) if path != file)
    return sorted(found)


def needed_extras(args: Mapping[str, Any]) -> set[str]:
    """Return the extras of Buckeye whose libraries the environment imports."""
    extras = set()
    sources = [args[name] for name in ("path", "eval_path") if isinstance(args.get(name), str)]
    if any(map(_needs_hub, sources)):
        extras.add("hub")
    built_in = [spec.partition(":")[0] for spec in _rewards(args) if is_built_in(spec)]
    extras |= {"mcp"} if built_in else set()
    return extras | ({"math"} if "math" in built_in else set())


def _rewards(args: Mapping[str, Any]) -> list[str]:
    rewards = args.get("reward", ())
    return [spec for spec in ([rewards] if isinstance(rewards, str) else rewards) if isinstance(spec, str)]


def _needs_hub(source: str) -> bool:
    """Return True for Parquet files, and for a dataset on the Hugging Face hub."""
    path = Path(os.path.expanduser(source))
    if not path.exists() or path.suffix.lower() == _PARQUET:
        return True
    return path.is_dir() and any(path.rglob(f"*{_PARQUET}"))
