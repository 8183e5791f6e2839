"""Command-line flags: the files that they name, and the settings that they set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from buckeye.config.flag_values import is_none, parse_bool, parse_text
from buckeye.config.problems import Problem
from buckeye.config.settings import KeyPath, Layer, Location, Settings, dotted
from buckeye.config.shared import BaseConfig
from buckeye.config.structure import Shape, resolve, unknown_setting

AT = "@"


@dataclass(frozen=True, slots=True)
class FileReference:
    """File argument `@ FILE`, at the root or after the flag of a section."""

    section: KeyPath
    file: str
    location: Location | None


@dataclass(frozen=True, slots=True)
class Assignment:
    """Value that a flag sets."""

    path: KeyPath
    value: Any
    location: Location


@dataclass(slots=True)
class Flags:
    """Parsed command line."""

    files: list[FileReference] = field(default_factory=list)
    assignments: list[Assignment] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def parse_flags(model: type[BaseConfig], argv: Sequence[str]) -> Flags:
    """Parse a command line for the configuration class `model`.

    `@ FILE` and `@FILE` name files, for all settings or, after the flag of a section, for that section. A
    flag is `--a.b VALUE` or `--a.b=VALUE`, with - or _ in its name. `--flag` and `--no-flag` set booleans; a
    section's flag alone enables it. Lists are `0,1`, `[0,1]`, or a repeated flag; sections may be JSON.
    """
    return _Parser(model, argv).parse()


def apply_flags(assignments: Sequence[Assignment], settings: Settings) -> list[Problem]:
    """Write the values of flags into the settings. The last one wins, repeated lists are joined, and a
    setting of a list item (`env.0.id`) overrides the list that contains it.
    """
    joined: dict[KeyPath, list[Any]] = {}
    for one in assignments:
        value = one.value
        if isinstance(value, list):
            value = joined.setdefault(one.path, [])
            value += one.value
        if not _indices(one.path):
            settings.put(one.path, value, one.location)
    problems = []
    for one in sorted(assignments, key=lambda a: _indices(a.path)):
        if _indices(one.path):
            problems += _put_in_list(one, settings)
    return problems


def _indices(path: KeyPath) -> tuple[int, ...]:
    return tuple(key for key in path if isinstance(key, int))


def _put_in_list(one: Assignment, settings: Settings) -> list[Problem]:
    first = next(i for i, key in enumerate(one.path) if isinstance(key, int))
    items = settings.get(one.path[:first])
    count = len(items) if isinstance(items, list) else 0
    if isinstance(index := one.path[first], int) and index > count:
        message = f"{dotted(one.path[:first])} has {count} entries, so the next one is number {count}."
        return [Problem(path=one.path, location=one.location, message=message)]
    settings.put(one.path, one.value, one.location)
    return []


class _Parser:
    def __init__(self, model: type[BaseConfig], argv: Sequence[str]) -> None:
        self.model = model
        self.words = list(argv)
        self.position = 0
        self.flags = Flags()

    def parse(self) -> Flags:
        while self.position < len(self.words):
            word = self._next()
            if word.startswith(AT):
                self._file((), word, None)
            elif word.startswith("--") and len(word) > 2:
                self._flag(word)
            else:
                self._stray(word)
        return self.flags

    def _next(self) -> str:
        self.position += 1
        return self.words[self.position - 1]

    def _peek(self) -> str | None:
        return self.words[self.position] if self.position < len(self.words) else None

    def _value(self) -> str | None:
        """Return the next word if it is a value, and advance."""
        word = self._peek()
        return self._next() if word is not None and _is_value(word) else None

    def _flag(self, word: str) -> None:
        name, sign, text = word[2:].partition("=")
        given = text if sign else None
        location = Location(f"--{name}", Layer.FLAG)
        target = resolve(self.model, name.split("."))
        if target.shape is None and given is None and name.startswith(("no-", "no_")):
            switched = resolve(self.model, name[3:].split("."))
            if switched.shape is not None and switched.shape.is_flag:
                self._assign(switched.path, False, location)
                return
        if target.shape is None:
            self._skip_values()
            self._problem(unknown_setting(self.model, target.path, location, target.owner))
        elif target.shape.tables:
            self._section(target.path, target.shape, given, location)
        else:
            self._setting(target.path, target.shape, given, location)

    def _skip_values(self) -> None:
        """Skip the values of an unusable flag."""
        while self._value() is not None:
            pass

    def _section(self, path: KeyPath, shape: Shape, given: str | None, location: Location) -> None:
        if given is None and (self._peek() or "").startswith(AT):
            self._file(path, self._next(), location)
            return
        given = self._value() if given is None else given
        if given is None:
            self._assign(path, {}, location)
        elif given.lstrip().startswith("{") or is_none(given, shape):
            self._parsed(path, shape, given, location)
        else:
            self._problem(
                Problem(
                    location=location,
                    message=f"{given!r} is no section. Write {location.text}.NAME VALUE or {location.text} @ FILE",
                )
            )

    def _setting(self, path: KeyPath, shape: Shape, given: str | None, location: Location) -> None:
        if bool in shape.scalars:
            self._switch(path, shape, given, location)
        elif given is None and (given := self._value()) is None:
            self._problem(Problem(location=location, message=f"needs a value: {shape.expected()}."))
        else:
            self._parsed(path, shape, given, location)

    def _switch(self, path: KeyPath, shape: Shape, given: str | None, location: Location) -> None:
        following = self._peek()
        if given is None and following is not None:
            is_word = parse_bool(following) is not None or is_none(following, shape)
            given = self._next() if is_word else None
        self._parsed(path, shape, "true" if given is None else given, location)

    def _parsed(self, path: KeyPath, shape: Shape, text: str, location: Location) -> None:
        try:
            self._assign(path, parse_text(text, shape), location)
        except ValueError as error:
            self._problem(Problem(path=path, location=location, message=f"{error}."))

    def _file(self, section: KeyPath, word: str, location: Location | None) -> None:
        file = word[1:] or self._value()
        if not file:
            where = f"{location.text} " if location is not None else ""
            self._problem(Problem(message=f"{where}@ needs a file: {where}@ FILE.toml"))
        else:
            self.flags.files.append(FileReference(section, file, location))

    def _stray(self, word: str) -> None:
        if Path(word).suffix in (".toml", ".json"):
            hint = f"To read a file, write @ {word}"
        else:
            hint = "Settings are written --name VALUE, files @ FILE.toml"
        self._problem(Problem(message=f"unexpected argument {word!r}. {hint}."))

    def _assign(self, path: KeyPath, value: Any, location: Location) -> None:
        self.flags.assignments.append(Assignment(path, value, location))

    def _problem(self, problem: Problem) -> None:
        self.flags.problems.append(problem)


def _is_value(word: str) -> bool:
    """Return True if a word is a value: neither a file nor a flag. Negative numbers are values."""
    dashed = word.startswith("--") or (word.startswith("-") and word[1:2].isalpha())
    return not dashed and not word.startswith(AT)
