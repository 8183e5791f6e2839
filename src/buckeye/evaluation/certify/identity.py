"""Identity of an environment: hashes of its files and tasks, and versions."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from buckeye.base.process import run_program
from buckeye.base.storage import sha256_files, utf8
from buckeye.dataset.environment import NAME as DATASET
from buckeye.envs.base import Environment, required_tasks, split_names
from buckeye.envs.registry import (
    AGENT,
    ENTRY_POINT_GROUP,
    LIBRARIES,
    EnvironmentId,
    find_bundled_project,
    is_file_id,
)
from buckeye.errors import UsageError
from buckeye.evaluation.checks.samples import MAX_SCANNED
from buckeye.mcp.environment import is_mcp
from buckeye.version import __version__
from buckeye.workers.installed import find_installed
from buckeye.workers.loading import package_name

_FIND_SECONDS = 60.0
_FUNCTIONS = ("callable", "reward")
_IGNORED_FOLDERS = frozenset({"__pycache__", "tests", "results", "node_modules", "build", "dist"})
_IGNORED_FILES = re.compile(r"\..*|.*\.(?:pyc|md|lock|log)|certificate\..*")


def identify(environment: Environment, env_id: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """Return hashes of the package's files and of all tasks, and versions."""
    files, version = _package(env_id, args)
    python = find_installed(package_name(env_id))
    return {
        "package": {"version": version, "sha256": _digest(files), "files": files},
        "tasks": {split: _tasks(environment, split) for split in split_names(environment)},
        "versions": {
            "python": python.python_version if python is not None else platform.python_version(),
            "buckeye": __version__,
        },
    }


def changes(recorded: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return one line for each file, split or version that differs from the certificate."""
    found = []
    before, after = recorded["package"]["files"], current["package"]["files"]
    for path in sorted(before.keys() | after.keys()):
        if before.get(path) != after.get(path):
            kind = "added" if path not in before else "removed" if path not in after else "changed"
            found.append(f"file {kind}: {path}")
    for split in sorted(recorded["tasks"].keys() | current["tasks"].keys()):
        old, new = recorded["tasks"].get(split, {}), current["tasks"].get(split, {})
        if old != new:
            found.append(
                f"tasks changed: {split} ({old.get('count', 0):,} before, {new.get('count', 0):,} now)"
            )
    if recorded["package"]["version"] != current["package"]["version"]:
        found.append(
            f"version changed: {recorded['package']['version']} before, {current['package']['version']} now"
        )
    return found


def _package(env_id: str, args: Mapping[str, Any]) -> tuple[dict[str, str], str | None]:
    """Return the hash of each file of an environment, and the version of its package, if it has one."""
    if is_mcp(env_id):
        folder = Path(os.path.expanduser(args["config_path"])).resolve().parent
        named = [args["config_path"], *(args.get(name) for name in ("dataset", "eval_dataset"))]
        return _hashes([*_local(named), *_project_files(folder)], folder), None
    if env_id == DATASET:
        rewards = [args["reward"]] if isinstance(args["reward"], str) else args["reward"]
        named = [args["path"], args.get("eval_path"), *(str(reward).partition(":")[0] for reward in rewards)]
        return _hashes(_local(named), Path.cwd()), None
    if env_id == AGENT:
        folder = Path(os.path.expanduser(args.get("cwd") or ".")).resolve()
        code = [*args.get("command", ()), *(args.get(key, "").rpartition(":")[0] for key in _FUNCTIONS)]
        named = [args["tasks"], args.get("eval_tasks"), *(folder / part for part in code if part)]
        return _hashes([*_local(named), *(_files(folder) if "cwd" in args else ())], folder), None
    bundled = find_bundled_project(env_id)
    path = bundled or Path(os.path.expanduser(env_id))
    if bundled or is_file_id(env_id):
        return _hashes([path] if path.is_file() else _project_files(path), path.resolve().parent), None
    return _installed_package(env_id)


def _installed_package(env_id: str) -> tuple[dict[str, str], str | None]:
    installed = find_installed(package_name(env_id))
    library, wanted = env_id.partition("/")[0], EnvironmentId.parse(env_id)
    entries = {entry.name: entry.module for entry in metadata.entry_points(group=ENTRY_POINT_GROUP)}
    module = installed.module if installed is not None else entries.get(wanted.name, wanted.module)
    module = LIBRARIES.get(library, module)
    python: Path = Path(sys.executable)
    version: str | None = None
    if installed is not None:
        python, version = installed.python, installed.version
    elif owners := metadata.packages_distributions().get(module.partition(".")[0]):
        version = metadata.version(owners[0])
    origin = _origin(module.partition(".")[0], python)
    if origin.name != "__init__.py":
        return _hashes([origin], origin.parent), version
    return _hashes(list(_files(origin.parent)), origin.parent.parent), version


def _origin(module: str, python: Path) -> Path:
    """Return the file of a top-level module of an interpreter, without importing it."""
    if python == Path(sys.executable):
        spec = importlib.util.find_spec(module)
        found = "" if spec is None else spec.origin or ""
    else:
        code = f"import importlib.util; print(importlib.util.find_spec({module!r}).origin)"
        found = run_program([str(python), "-I", "-c", code], seconds=_FIND_SECONDS).stdout.strip()
    if not Path(found).is_file():
        raise UsageError(
            f"no file of the module {module!r} found in {python}",
            code="BK-FILE-NOT-FOUND",
            hint="reinstall the environment with `buckeye env install`",
        )
    return Path(found)


def _project_files(folder: Path) -> list[Path]:
    """Return the files of a project: its `src`, else all, and the files next to it."""
    if not (folder / "src").is_dir():
        return list(_files(folder))
    beside = [path for path in folder.iterdir() if path.is_file() and not _IGNORED_FILES.fullmatch(path.name)]
    return [*beside, *_files(folder / "src")]


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        hidden = any(part in _IGNORED_FOLDERS or part.startswith(".") for part in parts[:-1])
        if path.is_file() and not hidden and not _IGNORED_FILES.fullmatch(path.name):
            yield path


def _local(names: Sequence[Any]) -> list[Path]:
    paths = [Path(os.path.expanduser(str(name))) for name in names if name is not None]
    files = [path for path in paths if path.is_file()]
    return [*files, *(inner for path in paths if path.is_dir() for inner in _files(path))]


def _hashes(paths: Sequence[Path], root: Path) -> dict[str, str]:
    unique, root = sorted({path.resolve() for path in paths}), root.resolve()
    hashes: dict[str, str] = {}
    for path, sha256 in zip(unique, sha256_files(unique), strict=True):
        name = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name
        while name in hashes:
            name += "'"
        hashes[name] = sha256
    return dict(sorted(hashes.items()))


def _tasks(environment: Environment, split: str) -> dict[str, Any]:
    """Return number and hash of the tasks of a split; of a longer one, the first `MAX_SCANNED`."""
    tasks, digest = required_tasks(environment, split), hashlib.sha256()
    for index in range(min(len(tasks), MAX_SCANNED)):
        task = tasks[index]
        values = [task.id, [dict(message) for message in task.messages], dict(task.data)]
        digest.update(utf8(json.dumps(values, sort_keys=True, ensure_ascii=False, default=str)) + b"\n")
    return {"count": len(tasks), "sha256": digest.hexdigest()}


def _digest(files: Mapping[str, str]) -> str:
    return hashlib.sha256(utf8(json.dumps(files))).hexdigest()
