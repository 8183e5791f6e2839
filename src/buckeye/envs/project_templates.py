"""New environments from the templates: `environments/template` of the source, or its copy in the package."""

from __future__ import annotations

import keyword
import re
import shutil
from pathlib import Path

from buckeye.errors import UsageError

KINDS = ("mcp", "python")
_NAME = re.compile(r"[a-z][a-z0-9]*(?:-[a-z0-9]+)*", re.ASCII)
_HERE = Path(__file__).parent
_PLACES = (_HERE / "templates", _HERE.parents[2] / "environments" / "template")
_NOT_COPIED = shutil.ignore_patterns("__pycache__", ".*")


def create_project(name: str, kind: str, folder: Path) -> list[Path]:
    """Write a project called `name` into the new folder `folder`. Return its files.

    Raise `UsageError` for an invalid name, an unknown kind, or an existing folder.
    """
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise UsageError(
            f"{name!r} is not the name of a project: use small letters, digits and hyphens, as my-game."
        )
    if kind not in KINDS:
        raise UsageError(f"--kind {kind}: choose {' or '.join(KINDS)}.")
    if folder.exists():
        raise UsageError(f"{folder} exists already; choose another name, or another place with --dir.")
    template = next(place for place in _PLACES if place.is_dir()) / kind
    module = name.replace("-", "_")
    class_name = "".join(word.capitalize() for word in name.split("-"))
    shutil.copytree(template, folder, ignore=_NOT_COPIED)
    for path in sorted(folder.rglob("*my_env*"), key=lambda path: -len(path.parts)):
        path.rename(path.with_name(path.name.replace("my_env", module)))
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        text = path.read_text(encoding="utf-8")
        text = text.replace("my-env", name).replace("my_env", module).replace("MyEnv", class_name)
        path.write_text(text, encoding="utf-8")
    return files
