"""Items of a split as rows of `verifiers`, and the check that its right version is installed."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from dakota1890.arguments import Arguments
from dakota1890.errors import ArgumentError, DakotaError
from dakota1890.splits import AXES
from dakota1890.tasks import Item, TrainTasks, eval_tasks

_REQUIREMENTS = {
    "v0": ("verifiers", "SingleTurnEnv", "verifiers>=0.1.14,<0.2"),
    "v1": ("verifiers.v1", "TaskData", "verifiers>=0.4,<0.5"),
}
"""Module, a name in it, and the package to install, for each API."""


class VerifiersError(DakotaError):
    """Installed `verifiers` with another API; the message names the version to install."""


def split_items(arguments: Arguments, split: str) -> Sequence[Item]:
    """Return the items of `train`, of `eval` (all held-out items), or of one held-out axis.

    Raises ArgumentError for another name.
    """
    options = arguments.options
    if split == "train":
        return TrainTasks(options, arguments.num_train)
    held_out = eval_tasks(options.families, options.depths, options.hint)
    if split == "eval":
        return held_out[: arguments.num_eval]
    if split in AXES:
        return tuple(item for item in held_out if item.data["split"] == split)
    raise ArgumentError(f"dakota1890: no split {split!r}", f"choose train, eval, {', '.join(AXES)}")


def to_info(item: Item) -> dict[str, Any]:
    """Return the id and the data of an item as one object for JSON."""
    return {"task_id": item.id, **item.data}


def from_info(info: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the id and the data, also after a JSON round trip, which turns tuples into lists."""
    data: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in info.items()
    }
    return str(data.pop("task_id")), data


def require_verifiers(api: str) -> None:
    """Raise VerifiersError unless a `verifiers` with this API (v0 or v1) can be imported."""
    module, name, requirement = _REQUIREMENTS[api]
    try:
        has_api = hasattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name not in ("verifiers", "verifiers.v1"):
            raise
        has_api = False
    if not has_api:
        raise VerifiersError(
            f"dakota1890 requires the {api} API of `verifiers`, but {_installed()}. "
            f"Install it: pip install '{requirement}'. "
            'Buckeye needs no verifiers: buckeye.load_environment("harleycooper/dakota1890")'
        )


def _installed() -> str:
    try:
        return f"verifiers {metadata.version('verifiers')} does not have it"
    except metadata.PackageNotFoundError:
        return "verifiers is not installed"
