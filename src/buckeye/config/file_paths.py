"""Make paths in a configuration file relative to the working directory.

In a file, paths of environments, data and rewards are relative to the folder of the file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "dataset": ("path", "eval_path"),
    "mcp": ("dataset", "eval_dataset", "config_path"),
    "buckeye-vf-gym": ("dataset", "eval_dataset", "config_path"),
    "agent": ("tasks", "eval_tasks"),
}
"""Arguments of Buckeye's own environments that name files. The argument `reward` may also name a file."""
_DATA = ("path", "val_path")
"""Files of conversations, in the section `data` of `buckeye sft` and in `supervised` of a trainer."""


def resolve_file_paths(values: dict[str, Any], file: Path) -> None:
    """Make the paths in the values of a file relative to the working directory, in place.

    A path that does not exist in the folder of the file stays unchanged.
    """
    folder = file.parent
    if folder == Path():
        return
    for env in _environments(values):
        env_id, args = env.get("id"), env.get("args")
        if isinstance(env_id, str) and (env_id.startswith(".") or env_id.endswith(".py")):
            located = _located(env_id, folder)
            is_short = not located.startswith((".", "/")) and not located.endswith(".py")
            env["id"] = f"./{located}" if is_short else located  # without `./`, it would mean OWNER/NAME
        if isinstance(args, dict) and isinstance(env_id, str) and env_id in _ARGUMENTS:
            for name in _ARGUMENTS[env_id]:
                if isinstance(args.get(name), str):
                    args[name] = _located(args[name], folder)
            if "reward" in args:
                args["reward"] = _located_rewards(args["reward"], folder)
    trainer = values.get("trainer")
    tables = [values, trainer] if isinstance(trainer, dict) else [values]
    for data in (table.get(section) for table in tables for section in ("data", "supervised")):
        if isinstance(data, dict):
            data |= {name: _located(data[name], folder) for name in _DATA if isinstance(data.get(name), str)}


def _environments(values: Any) -> Iterator[dict[str, Any]]:
    """Yield the tables of environments, at any depth."""
    for name, value in values.items() if isinstance(values, dict) else ():
        if name == "env" and isinstance(value, list):
            yield from (table for table in value if isinstance(table, dict))
        else:
            yield from _environments(value)


def _located(text: str, folder: Path) -> str:
    path = folder / os.path.expanduser(text)
    return str(path) if os.path.exists(path) else text  # False also for a text that cannot be a path


def _located_rewards(reward: Any, folder: Path) -> Any:
    if isinstance(reward, list):
        return [_located_rewards(part, folder) for part in reward]
    if not isinstance(reward, str):
        return reward
    kind, _, named = reward.partition(":")
    if kind in ("json", "judge") and named:
        return f"{kind}:{_located(named, folder)}"
    file, sign, function = reward.partition(".py")
    return f"{_located(f'{file}.py', folder)}{function}" if sign else reward
