"""Parse command-line flags into configuration files and values of settings."""

from __future__ import annotations

import os.path
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from buckeye.config.flag_values import is_none, parse_bool, parse_text
from buckeye.config.problems import Problem
from buckeye.config.settings import KeyPath, Layer, Location, Settings, dotted, flag_of
from buckeye.config.shared import BaseConfig
from buckeye.config.structure import Shape, resolve, unknown_setting
from buckeye.config.validation import format_value

AT = "@"
_ARGUMENT = "BK-CLI-ARGUMENT"
_SHORT_FORMS = {"model": "name", "data": "path"}
"""Setting that the flag of a section sets, by section: `--model X` means `--model.name X`."""


@dataclass(frozen=True, slots=True)
class FileReference:
    """Argument `@ FILE`, for all settings, or for one section after the flag of the section."""

    section: KeyPath
    file: str
    location: Location | None


@dataclass(frozen=True, slots=True)
class Assignment:
    """Value of a setting, and the flag or file line that sets it."""

    path: KeyPath
    value: Any
    location: Location

    def __str__(self) -> str:
        shown = "{...}" if isinstance(self.value, dict) else format_value(self.value)
        return f"`{dotted(self.path)}` = {shown}"


@dataclass(slots=True)
class Flags:
    """Result of parsing a command line: files, values of settings, and problems."""

    files: list[FileReference] = field(default_factory=list)
    assignments: list[Assignment] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def parse_flags(model: type[BaseConfig], argv: Sequence[str]) -> Flags:
    """Parse a command line for the configuration class `model`.

    `@ FILE` and `@FILE` name files, for all settings or, after the flag of a section, for that section. A
    flag is `--a.b VALUE` or `--a.b=VALUE`, with - or _ in its name. `--flag` and `--no-flag` set booleans,
    and turn optional sections on and off. Lists are `0,1`, `[0,1]`, or a repeated flag; sections may be JSON.
    `--model VALUE` sets `model.name`, and `--data VALUE` sets `data.path`.
    """
    return _Parser(model, argv).parse()


def apply_flags(assignments: Sequence[Assignment], settings: Settings) -> list[Problem]:
    """Write the values of flags into the settings.

    The last of repeated flags takes precedence, but repeated lists are joined. A flag for a setting of a list
    item (`env.0.id`) overrides the value in the list.
    """
    joined: dict[KeyPath, list[Any]] = {}
    problems = []
    for assignment in sorted(assignments, key=lambda assignment: _indices(assignment.path)):
        path, value = assignment.path, assignment.value
        if isinstance(value, list):
            value = joined.setdefault(path, [])
            value += assignment.value
        if (problem := _missing_entry(assignment, settings)) is not None:
            problems.append(problem)
        else:
            settings.put(path, value, assignment.location)
    return problems


def _indices(path: KeyPath) -> tuple[int, ...]:
    return tuple(key for key in path if isinstance(key, int))


def _missing_entry(assignment: Assignment, settings: Settings) -> Problem | None:
    """Return a problem if the index of a list item is larger than the length of the list, else None."""
    path = assignment.path
    first = next((i for i, key in enumerate(path) if isinstance(key, int)), len(path))
    items = settings.get(path[:first])
    count = len(items) if isinstance(items, list) else 0
    index = path[first] if first < len(path) else 0
    if not isinstance(index, int) or index <= count:
        return None
    message = f"`{dotted(path[:first])}` has no entry {index - 1}, so it cannot have an entry {index}"
    hint = f"use `{flag_of((*path[:first], count, *path[first + 1 :]))}`: entries are numbered from 0"
    return Problem(path=path, location=assignment.location, message=message, hint=hint, code=_ARGUMENT)


class _Parser:
    def __init__(self, model: type[BaseConfig], argv: Sequence[str]) -> None:
        self.model = model
        self.argv = list(argv)
        self.position = 0
        self.flags = Flags()

    def parse(self) -> Flags:
        while self.position < len(self.argv):
            arg = self._next()
            if arg.startswith(AT):
                self._add_file((), arg, None)
            elif arg.startswith("--") and len(arg) > 2:
                self._parse_flag(arg)
            else:
                self._refuse(arg)
        return self.flags

    def _next(self) -> str:
        self.position += 1
        return self.argv[self.position - 1]

    def _peek(self) -> str | None:
        return self.argv[self.position] if self.position < len(self.argv) else None

    def _next_value(self) -> str | None:
        """Return the next argument and advance, if it is a value. Return None otherwise."""
        arg = self._peek()
        return self._next() if arg is not None and _is_value(arg) else None

    def _parse_flag(self, arg: str) -> None:
        name, sign, value = arg[2:].partition("=")
        text = value if sign else None
        location = Location(f"--{name}", Layer.FLAG)
        target = resolve(self.model, name.split("."))
        if target.shape is None and text is None and name.startswith(("no-", "no_")):
            negated = resolve(self.model, name[3:].split("."))
            if negated.shape is not None and negated.shape.is_flag:
                self._assign(negated.path, False, location)
                return
            if negated.shape is not None and negated.shape.tables and negated.shape.optional:
                self._assign(negated.path, None, location)
                return
        if target.shape is None:
            self._skip_values()
            self._report(unknown_setting(self.model, target.path, location, target.owner))
        elif target.shape.tables:
            self._set_section(target.path, target.shape, text, location)
        else:
            self._set_value(target.path, target.shape, text, location)

    def _skip_values(self) -> None:
        """Skip the values after an unknown flag."""
        while self._next_value() is not None:
            pass

    def _set_section(self, path: KeyPath, shape: Shape, text: str | None, location: Location) -> None:
        if text is None and (self._peek() or "").startswith(AT):
            self._add_file(path, self._next(), location)
            return
        text = self._next_value() if text is None else text
        if text is None and str(path[-1]) in _SHORT_FORMS:
            self._report_missing_value(location, f"a {_SHORT_FORMS[str(path[-1])]}")
        elif text is None:
            self._assign(path, {}, location)
        elif text.lstrip().startswith("{") or is_none(text, shape):
            self._assign_text(path, shape, text, location)
        elif (short := self._short_form(path, shape, text)) is not None:
            self._assign_text(*short, text, location)
        else:
            message = f"`{location.text}` is a section, which cannot have the value {text!r}"
            hint = f"write `{location.text}.NAME VALUE` or `{location.text} @ FILE`"
            self._report(Problem(message=message, hint=hint, code=_ARGUMENT))

    def _short_form(self, path: KeyPath, shape: Shape, text: str) -> tuple[KeyPath, Shape] | None:
        """Return the setting that `--SECTION VALUE` sets, or None if the section has no short form."""
        name = _SHORT_FORMS.get(str(path[-1]))
        setting = shape.find(name) if name is not None and Path(text).suffix != ".toml" else None
        return None if name is None or setting is None else ((*path, name), setting)

    def _set_value(self, path: KeyPath, shape: Shape, text: str | None, location: Location) -> None:
        if bool in shape.scalars:
            self._set_boolean(path, shape, text, location)
        elif text is None and (text := self._next_value()) is None:
            self._report_missing_value(location, shape.expected())
        else:
            self._assign_text(path, shape, text, location)

    def _report_missing_value(self, location: Location, expected: str) -> None:
        message = f"`{location.text}` requires a value"
        self._report(Problem(message=message, hint=f"give {expected}", code="BK-CONFIG-MISSING"))

    def _set_boolean(self, path: KeyPath, shape: Shape, text: str | None, location: Location) -> None:
        following = self._peek()
        if text is None and following is not None:
            is_value = parse_bool(following) is not None or is_none(following, shape)
            is_value = is_value or following in shape.choices
            text = self._next() if is_value else None
        self._assign_text(path, shape, "true" if text is None else text, location)

    def _assign_text(self, path: KeyPath, shape: Shape, text: str, location: Location) -> None:
        try:
            self._assign(path, parse_text(text, shape), location)
        except ValueError as error:
            self._report(Problem(message=f"`{location.text}`: {error}"))

    def _add_file(self, section: KeyPath, arg: str, location: Location | None) -> None:
        file = arg[1:] or self._next_value()
        if not file:
            flag = f"{location.text} @" if location is not None else "@"
            message, hint = f"`{flag}` requires a file", f"write `{flag} FILE.toml`"
            self._report(Problem(message=message, hint=hint, code="BK-CLI-MISSING"))
        else:
            self.flags.files.append(FileReference(section, file, location))

    def _refuse(self, arg: str) -> None:
        hint = "write settings as `--NAME VALUE`, and files as `@ FILE.toml`"
        if Path(arg).suffix in (".toml", ".json"):
            hint = f"to read a file, write `@ {arg}`"
        elif os.path.exists(os.path.join(arg, "config.json")):
            hint = f"to name a model, write `--model {arg}`"
        self._report(Problem(message=f"unexpected argument {arg!r}", hint=hint, code=_ARGUMENT))

    def _assign(self, path: KeyPath, value: Any, location: Location) -> None:
        self.flags.assignments.append(Assignment(path, value, location))

    def _report(self, problem: Problem) -> None:
        self.flags.problems.append(problem)


def _is_value(arg: str) -> bool:
    """Return True if an argument is neither a file nor a flag. Negative numbers are values."""
    is_flag = arg.startswith("--") or (arg.startswith("-") and arg[1:2].isalpha())
    return not is_flag and not arg.startswith(AT)
