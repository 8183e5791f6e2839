"""The `--help` of a command whose flags are its configuration."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import Any

from pydantic.fields import FieldInfo

from buckeye.config.base import BaseConfig
from buckeye.config.settings import KeyPath, dotted, flag_of
from buckeye.config.structure import Shape, fields_of

_FLAG_WIDTH = 38
_USAGE = """\
usage: {prog} [@ FILE.toml ...] [--SECTION @ FILE.toml ...] [--NAME VALUE ...]

{summary}

Files are TOML or JSON; later ones win, flags win over files, files over PRIME_* variables. Write
--a.b VALUE or --a.b=VALUE; --flag and --no-flag; lists as 0,1 or [0,1]; None for nothing. A file's
`toml_files = ["base.toml"]` names files it builds on. The bare flag of a section that is off turns it on.
"""


def help_text(model: type[BaseConfig], prog: str) -> str:
    """Plain text: how to call `prog`, then every setting, section by section, a line each."""
    usage = _USAGE.format(prog=prog, summary=_summary(model))
    return "\n".join([usage, *_section(model, (), f"{prog}:")]).rstrip()


def flag_names(model: type[BaseConfig], path: KeyPath = ()) -> Iterator[str]:
    """The flags of all settings; those of a list of sections are the ones of its first."""
    for name, shape in fields_of(model).items():
        inner = shape.element if shape.element is not None else shape
        below = (*path, name, 0) if shape.element is not None else (*path, name)
        if not inner.tables:
            yield flag_of((*path, name))
        for table in inner.tables:
            yield from flag_names(table, below)


def _summary(model: type[BaseConfig]) -> str:
    return (inspect.getdoc(model) or "").strip()


def _section(model: type[BaseConfig], path: KeyPath, title: str) -> Iterator[str]:
    """The settings of a section, then the sections in it."""
    fields = model.model_fields
    shapes = fields_of(model)
    yield title
    for name, shape in shapes.items():
        if not _holds_sections(shape):
            yield _line((*path, name), shape, fields[name])
    yield ""
    for name, shape in shapes.items():
        if _holds_sections(shape):
            yield from _inner((*path, name), shape, fields[name])


def _holds_sections(shape: Shape) -> bool:
    return bool(shape.tables or (shape.element is not None and shape.element.tables))


def _inner(path: KeyPath, shape: Shape, info: FieldInfo) -> Iterator[str]:
    is_list = shape.element is not None
    tables = shape.element.tables if shape.element is not None else shape.tables
    below = (*path, 0) if is_list else path
    header = f"[[{dotted(path)}]]" if is_list else f"[{dotted(path)}]"
    state = " Off by default." if info.get_default() is None and shape.optional else ""
    for table in tables:
        kind = f' type = "{fields_of(table)["type"].choices[0]}":' if len(tables) > 1 else ""
        text = _summary(table) if kind else (info.description or "")
        yield from _section(table, below, f"{header}{kind} {text}{state}")


def _line(path: KeyPath, shape: Shape, info: FieldInfo) -> str:
    flag = f"  {flag_of(path)}"
    default = (
        "required"
        if info.is_required()
        else f"default {_written(info.get_default(call_default_factory=True))}"
    )
    separator = " " if len(flag) < _FLAG_WIDTH else "  "
    return f"{flag:<{_FLAG_WIDTH}}{separator}{info.description} ({shape.expected()}; {default})"


def _written(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "None", True: "true", False: "false"}[value]
    if isinstance(value, list | dict):
        return json.dumps(value)
    return str(value)
