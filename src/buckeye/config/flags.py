"""Command-line flags: which files they name, and which settings they make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from buckeye.config.problems import Problem
from buckeye.config.settings import KeyPath, Layer, Place, Settings, dotted
from buckeye.config.shared import BaseConfig
from buckeye.config.source import load_json
from buckeye.config.structure import Shape, Target, resolve, unknown_setting

# From the text of a flag or of an environment variable to a value.

NONE_WORDS = ("None", "null")
_BOOLS = {"true": True, "false": False, "yes": True, "no": False, "on": True, "off": False}


def is_none(text: str, shape: Shape) -> bool:
    """Whether the text stands for None here."""
    return shape.optional and text in NONE_WORDS


def parse_bool(text: str) -> bool | None:
    """True or false; None if the text is neither."""
    return {**_BOOLS, "1": True, "0": False}.get(text.lower())


def parse_text(text: str, shape: Shape) -> Any:
    """The value that `text` stands for where `shape` is expected.

    Text that is not of the expected type stays text, for validation to complain about. Raises ValueError
    where only JSON can be meant and it is not valid.
    """
    if is_none(text, shape):
        return None
    if shape.tables or shape.free is not None:
        return _json_object(text)
    if shape.element is not None:
        return _list(text, shape.element)
    if shape.scalars or shape.choices:
        return _scalar(text, shape)
    return _anything(text)


def _scalar(text: str, shape: Shape) -> Any:
    if bool in shape.scalars and (value := parse_bool(text)) is not None:
        return value
    for number in (int, float):
        if number in shape.scalars:
            try:
                return number(text)
            except ValueError:
                continue
    return text


def _list(text: str, element: Shape) -> list[Any]:
    inner = text.strip()
    if inner.startswith(("[", "{")):
        try:
            value = load_json(inner)
        except (ValueError, RecursionError) as error:
            if element.tables:
                raise ValueError(_not_json(inner, error)) from None
        else:
            return value if isinstance(value, list) else [value]
        inner = inner.removeprefix("[").removesuffix("]")
    elif element.tables:
        raise ValueError(f'{text!r} is no JSON; a list of sections is written as \'[{{"id": "..."}}]\'')
    return [parse_text(item.strip(), element) for item in inner.split(",")] if inner.strip() else []


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = load_json(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(_not_json(text, error)) from None
    if not isinstance(value, dict):
        raise ValueError(f"expected settings as JSON, as '{{\"name\": value}}', not {text}")
    return value


def _not_json(text: str, error: Exception) -> str:
    reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
    return f"{text!r} is not valid JSON: {reason}"


def _anything(text: str) -> Any:
    """A value for code that is not ours: JSON or Python words where it reads as such, text otherwise."""
    words: dict[str, Any] = {"None": None, "True": True, "False": False}
    if text in words:
        return words[text]
    try:
        return load_json(text)
    except (ValueError, RecursionError):
        return text


# Command-line flags: which files they name, and which settings they make.

AT = "@"


@dataclass(frozen=True, slots=True)
class FileReference:
    """`@ FILE` at the root, or behind the flag of a section."""

    section: KeyPath
    file: str
    place: Place | None


@dataclass(frozen=True, slots=True)
class Assignment:
    """A value that a flag sets."""

    path: KeyPath
    value: Any
    place: Place


@dataclass(slots=True)
class Flags:
    """What a command line says."""

    files: list[FileReference] = field(default_factory=list)
    assignments: list[Assignment] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def parse_flags(model: type[BaseConfig], argv: Sequence[str]) -> Flags:
    """Read a command line for the configuration class `model`.

    `@ FILE` and `@FILE` name files, for everything or behind the flag of a section. A flag is `--a.b VALUE`
    or `--a.b=VALUE`, with - or _ in its name. `--flag` and `--no-flag` switch; the bare flag of a section
    enables it. Lists are `0,1`, `[0,1]`, `0 1`, or the flag several times; sections may be JSON.
    """
    return _Parser(model, argv).parse()


def apply(assignments: Sequence[Assignment], settings: Settings) -> list[Problem]:
    """Write the values of flags into the settings: the last one wins, lists given several times are joined,
    and a setting of one list item (`env.0.id`) goes over the list that contains it."""
    joined: dict[KeyPath, list[Any]] = {}
    for one in assignments:
        value = one.value
        if isinstance(value, list):
            value = joined.setdefault(one.path, [])
            value += one.value
        if not _indices(one.path):
            settings.put(one.path, value, one.place)
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
        return [Problem(path=one.path, place=one.place, message=message)]
    settings.put(one.path, one.value, one.place)
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

    def _values(self) -> list[str]:
        """Take the words that follow, up to the next flag or file."""
        values = []
        while (word := self._value()) is not None:
            values.append(word)
        return values

    def _value(self) -> str | None:
        """Take the next word if it is a value."""
        word = self._peek()
        return self._next() if word is not None and _is_value(word) else None

    def _flag(self, word: str) -> None:
        name, sign, text = word[2:].partition("=")
        given = text if sign else None
        place = Place(f"--{name}", Layer.FLAG)
        target = resolve(self.model, name.split("."))
        negated = False
        if target.shape is None and name.startswith(("no-", "no_")):
            switched = resolve(self.model, name[3:].split("."))
            negated = switched.shape is not None and switched.shape.is_flag
            target = switched if negated else target
        if target.shape is None:
            if given is None:
                self._skip_values()
            self._problem(unknown_setting(self.model, target.path, place, target.owner))
        elif negated:
            self._negation(target, given, place)
        elif target.shape.tables:
            self._section(target.path, target.shape, given, place)
        else:
            self._setting(target.path, target.shape, given, place)

    def _skip_values(self) -> None:
        """Leave out what belongs to a flag that cannot be used."""
        if not (self._peek() or "").startswith(AT):
            self._values()
        elif self._next() == AT:
            self._value()

    def _negation(self, target: Target, given: str | None, place: Place) -> None:
        if given is not None:
            message = f"takes no value; write --{place.text[5:]}={given} or {place.text}."
            self._problem(Problem(place=place, message=message))
        else:
            self._assign(target.path, False, place)

    def _section(self, path: KeyPath, shape: Shape, given: str | None, place: Place) -> None:
        following = self._peek() if given is None else given
        if following is not None and following.startswith(AT):
            self._file(path, self._next() if given is None else given, place)
            return
        if given is None:
            given = self._value()
        if given is None:
            self._assign(path, {}, place)
        elif given.lstrip().startswith("{") or is_none(given, shape):
            self._parsed(path, shape, given, place)
        else:
            self._problem(Problem(place=place, message=_no_section(given, place, shape)))

    def _setting(self, path: KeyPath, shape: Shape, given: str | None, place: Place) -> None:
        if given is None and (self._peek() or "").startswith(AT):
            message = f"@ FILE gives a whole section its settings; {dotted(path)} is {shape.expected()}."
            self._skip_values()
            self._problem(Problem(place=place, message=message))
        elif bool in shape.scalars:
            self._switch(path, shape, given, place)
        elif shape.element is not None and given is None:
            self._list(path, shape, self._values(), place)
        elif given is None and (given := self._value()) is None:
            self._problem(Problem(place=place, message=f"needs a value: {shape.expected()}."))
        else:
            self._parsed(path, shape, given, place)

    def _switch(self, path: KeyPath, shape: Shape, given: str | None, place: Place) -> None:
        following = self._peek()
        if given is None and following is not None:
            is_word = parse_bool(following) is not None or is_none(following, shape)
            given = self._next() if is_word else None
        self._parsed(path, shape, "true" if given is None else given, place)

    def _list(self, path: KeyPath, shape: Shape, texts: list[str], place: Place) -> None:
        if not texts:
            self._problem(Problem(place=place, message=f"needs a value: {shape.expected()}."))
        elif len(texts) == 1:
            self._parsed(path, shape, texts[0], place)
        else:
            for text in texts:
                self._parsed(path, shape, text, place)

    def _parsed(self, path: KeyPath, shape: Shape, text: str, place: Place) -> None:
        try:
            self._assign(path, parse_text(text, shape), place)
        except ValueError as error:
            self._problem(Problem(path=path, place=place, message=f"{error}."))

    def _file(self, section: KeyPath, word: str, place: Place | None) -> None:
        file = word[1:] or self._value()
        if not file:
            where = f"{place.text} " if place is not None else ""
            self._problem(Problem(message=f"{where}@ needs a file: {where}@ FILE.toml"))
        else:
            self.flags.files.append(FileReference(section, file, place))

    def _stray(self, word: str) -> None:
        if Path(word).suffix in (".toml", ".json"):
            hint = f"To read a file, write @ {word}"
        elif word.startswith("-") and len(word.strip("-")) > 1:
            hint = f"Long flags start with two dashes: --{word.strip('-')}"
        else:
            hint = "Settings are written --name VALUE, files @ FILE.toml"
        self._problem(Problem(message=f"unexpected argument {word!r}. {hint}."))

    def _assign(self, path: KeyPath, value: Any, place: Place) -> None:
        self.flags.assignments.append(Assignment(path, value, place))

    def _problem(self, problem: Problem) -> None:
        self.flags.problems.append(problem)


def _no_section(word: str, place: Place, shape: Shape) -> str:
    if Path(word).suffix in (".toml", ".json"):
        return f"to read a file, write {place.text} @ {word}"
    if len(shape.tables) > 1:
        return f"{word!r} is no section. To choose its kind, write {place.text}.type {word}"
    return (
        f"{word!r} is no section. Set what is in it ({place.text}.NAME VALUE), or give a file (@ FILE.toml)."
    )


def _is_value(word: str) -> bool:
    """Whether a word is a value: not a file, not a flag; negative numbers are."""
    dashed = word.startswith("--") or (word.startswith("-") and word[1:2].isalpha())
    return not dashed and not word.startswith(AT)
