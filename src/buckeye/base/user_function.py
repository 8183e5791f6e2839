"""Load functions of the user that settings name, such as a loss, an advantage or reward shaping."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from buckeye.errors import THIRD_PARTY_ERRORS, UsageError


def load_user_function(import_path: str, kwargs: Mapping[str, Any], *, setting: str) -> Callable[..., Any]:
    """Import and return the function `module:name` or `path/to/file.py:name` that `setting` names.

    Raise `UsageError` if the function does not exist, or does not accept one argument and `kwargs`.
    """
    try:
        function = _load_function(import_path)
    except UsageError as error:
        raise error.prefixed(f"`{setting}.import_path` = {import_path!r}") from error.__cause__
    try:
        inspect.signature(function).bind(None, **kwargs)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"`{setting}.import_path` = {import_path!r} cannot be called with one argument and "
            f"`{setting}.kwargs` = {dict(kwargs)}: {error}",
            code="BK-CONFIG-VALUE",
            hint=f"change the function or `{setting}.kwargs`",
        ) from None
    return function


def find_missing_function(import_path: str) -> str | None:
    """Return a text that names the missing module, file or function, or None if the function exists.

    The check does not run the code of the function.
    """
    source, _, name = import_path.rpartition(":")
    path = Path(os.path.expanduser(source))
    if not source.endswith(".py"):
        try:
            spec = importlib.util.find_spec(source)
        except (ImportError, ValueError):
            spec = None
        if spec is None:
            return f"no module {source}"
        path = Path(spec.origin or "")
    elif not path.is_file():
        return f"no file {source}"
    try:
        parsed = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):  # compiled code, or an error that a later import reports
        return None
    names = {node.id for node in ast.walk(parsed) if isinstance(node, ast.Name)}
    names |= {node.asname or node.name for node in ast.walk(parsed) if isinstance(node, ast.alias)}
    names |= {node.name for node in ast.walk(parsed) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    if name in {node.name for node in ast.walk(parsed) if isinstance(node, ast.AsyncFunctionDef)} - names:
        return f"{source}: {name!r} is an `async def`, and must be a plain function"
    return None if names & {name, "*", "__getattr__"} else f"{source} has no function {name!r}"


@cache
def _load_function(import_path: str) -> Callable[..., Any]:
    source, _, name = import_path.rpartition(":")
    try:
        module = (
            import_file(Path(os.path.expanduser(source)))
            if source.endswith(".py")
            else importlib.import_module(source)
        )
    except THIRD_PARTY_ERRORS as error:
        message = f"cannot import {source}: {type(error).__name__}: {error}"
        raise UsageError(message, code="BK-CONFIG-VALUE", hint="fix the error or the path") from error
    function = getattr(module, name, None)
    if not callable(function):
        message, hint = f"{source} has no function {name!r}", "name a function that the module defines"
        raise UsageError(message, code="BK-CONFIG-VALUE", hint=hint)
    if inspect.iscoroutinefunction(function):
        message = f"{source}: {name!r} is an `async def`"
        raise UsageError(message, code="BK-CONFIG-VALUE", hint="write it as a plain function")
    return function  # type: ignore[no-any-return]


def import_file(path: Path) -> ModuleType:
    """Import a Python file of the user. The file can import modules in its folder.

    Unlike those of a script, they do not replace modules of Python: a file may be named `calendar.py`.
    """
    folder = str(path.parent.resolve())
    if folder not in sys.path:
        others = (
            i for i, entry in enumerate(sys.path) if Path(entry).name in ("site-packages", "dist-packages")
        )
        sys.path.insert(next(others, len(sys.path)), folder)
    name = f"buckeye_local_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(
            f"{path} is not a Python file", code="BK-ENV-LOAD", hint="give a .py file or a project folder"
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
