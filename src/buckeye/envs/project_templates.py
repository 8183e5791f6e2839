"""Create environment projects from the templates in the package or in `environments/template`."""

from __future__ import annotations

import keyword
import re
import shutil
import sys
from pathlib import Path

from buckeye.errors import UsageError

KINDS = ("mcp", "python")
_NAME = re.compile(r"[a-z][a-z0-9]*(?:-[a-z0-9]+)*", re.ASCII)
_FOLDER = Path(__file__).parent
_TEMPLATE_FOLDERS = (_FOLDER / "templates", _FOLDER.parents[2] / "environments" / "template")
_IGNORED = shutil.ignore_patterns("__pycache__", ".*")


def create_project(name: str, kind: str, folder: Path) -> list[Path]:
    """Write a project with the name `name` into the new folder `folder`. Return the project's files.

    Raise `UsageError` for an invalid name, an unknown kind, or an existing folder.
    """
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise UsageError(
            f"invalid project name {name!r}",
            code="BK-CLI-ARGUMENT",
            hint="use lowercase letters, digits and hyphens, such as `my-game`, but not a Python keyword",
        )
    if name.replace("-", "_") in {*sys.stdlib_module_names, "buckeye", "mcp"}:
        raise UsageError(
            f"invalid project name {name!r}: Python or Buckeye imports a module with this name",
            code="BK-CLI-ARGUMENT",
            hint=f"choose another name, such as `{name}-game`",
        )
    if kind not in KINDS:
        raise UsageError(
            f"--kind: unknown kind {kind!r}", code="BK-CLI-ARGUMENT", hint=f"choose {' or '.join(KINDS)}"
        )
    if folder.exists():
        raise UsageError(
            f"{folder} exists already",
            code="BK-FILE-EXISTS",
            hint="choose another name, or another folder with --dir",
        )
    template = next(path for path in _TEMPLATE_FOLDERS if path.is_dir()) / kind
    module = name.replace("-", "_")
    class_name = "".join(word.capitalize() for word in name.split("-"))
    shutil.copytree(template, folder, ignore=_IGNORED)
    for path in sorted(folder.rglob("*my_env*"), key=lambda path: -len(path.parts)):
        path.rename(path.with_name(path.name.replace("my_env", module)))
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        text = path.read_text(encoding="utf-8")
        text = text.replace("my-env", name).replace("my_env", module).replace("MyEnv", class_name)
        path.write_text(text, encoding="utf-8")
    return files
