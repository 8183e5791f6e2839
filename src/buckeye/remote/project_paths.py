"""Local files that must be sent with a project, so that its configuration is valid on another machine."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from buckeye.errors import UsageError


def relative_to_project(path: Path, root: Path) -> Path:
    """Return the path of a file relative to `root`. Raises UsageError if it is outside."""
    try:
        return path.resolve().relative_to(root)
    except ValueError:
        raise UsageError(
            f"{path} is not in the current folder, which is the one that is sent",
            code="BK-REMOTE-TRANSFER",
            hint="run the command in the project's folder",
        ) from None


def find_named_paths(settings: Mapping[str, Any], root: Path) -> Iterator[Path]:
    """Yield every file and folder that a text in the settings names, relative to `root`, as written there.

    `root` is the working directory. Raises UsageError for a path that would not exist on another machine.
    """
    for text in dict.fromkeys(_texts(settings)):
        if not text or len(text) > 1000 or "\0" in text:
            continue
        path = Path(text)
        if not os.path.exists(path) or path.resolve() in (root, Path("/")):
            continue
        if path.is_absolute() or ".." in path.parts or not path.resolve().is_relative_to(root):
            raise UsageError(
                f"the configuration names {text}, which is outside of the project's folder, or absolute",
                code="BK-REMOTE-TRANSFER",
                hint="move it into the project's folder and write its relative path",
            )
        yield path


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if key != "output_dir":
                yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
