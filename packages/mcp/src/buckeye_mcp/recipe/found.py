"""What there is to train with in a folder: configurations of environments, tasks, models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from buckeye.base.storage import read_json
from buckeye_mcp.tasks.lock import LOCK_FILE, Lock, read_lock

_TASK_FILES = ("tasks.json", "tasks.jsonl", "task.json", "*_tasks.json", "*_tasks.jsonl")
_MODELS = ("*", "models/*")
_TRAINED = ("outputs/*/exports/*", "outputs/*/weights/*")
_MOST_TRAINED = 5
_ACTIONS = "action_mappings:"
_MOST_READ = 4_000_000  # bytes of a YAML file that are looked at


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Paths as a person in that folder would write them, best first. `trained` are models that runs left."""

    lock: Lock | None
    configs: tuple[Path, ...]
    datasets: tuple[str, ...]
    models: tuple[str, ...]
    trained: tuple[str, ...]


def look_around(folder: Path = Path()) -> Found:
    """Look at a folder. Nothing is started and nothing is read from a network. Raises ConfigError for a lock
    file that is none."""
    lock_file = folder / LOCK_FILE
    lock = read_lock(lock_file) if lock_file.is_file() else None
    return Found(
        lock=lock,
        configs=tuple(_configs(folder)),
        datasets=tuple(_datasets(folder, lock)),
        models=tuple(_models(folder, _MODELS)),
        trained=tuple(_models(folder, _TRAINED)[:_MOST_TRAINED]),
    )


def _configs(folder: Path) -> list[Path]:
    """The files of `configs/`; where there are none, those beside it that name actions."""
    found = sorted(p for ending in ("*.yaml", "*.yml") for p in (folder / "configs").glob(ending))
    if found:
        return found
    beside = sorted(p for ending in ("*.yaml", "*.yml") for p in folder.glob(ending))
    return [path for path in beside if path.name != LOCK_FILE and _names_actions(path)]


def _names_actions(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8") as file:
            return any(line.startswith(_ACTIONS) for line in file.read(_MOST_READ).splitlines())
    except (OSError, UnicodeDecodeError):
        return False


def _datasets(folder: Path, lock: Lock | None) -> list[str]:
    """The dataset of the lock file; else task files; else folders that `buckeye hf --no-push` has written."""
    if lock is not None and lock.primary_dataset is not None:
        name = lock.primary_dataset.name
        return [str(folder / name) if (folder / name).exists() else name]
    files = list(dict.fromkeys(p for pattern in _TASK_FILES for p in sorted(folder.glob(pattern))))
    if files:
        return [str(path) for path in files]
    folders = {path.parent.parent for path in folder.glob("*/data/*.parquet")}
    folders |= {path.parent.parent for path in folder.glob("*/*/data/*.parquet")}
    return sorted(str(path) for path in folders)


def _models(folder: Path, patterns: Sequence[str]) -> list[str]:
    """Folders with a model that could be trained, newest first."""
    found = {path.parent for pattern in patterns for path in folder.glob(f"{pattern}/config.json")}
    models = [path for path in found if _is_model(path)]
    return [str(path) for path in sorted(models, key=lambda path: path.stat().st_mtime, reverse=True)]


def _is_model(folder: Path) -> bool:
    try:
        described = read_json(folder / "config.json")
    except (OSError, json.JSONDecodeError, UnicodeDecodeError):
        return False
    return (
        isinstance(described, dict)
        and bool(described.get("architectures"))
        and any(folder.glob("*.safetensors"))
    )
