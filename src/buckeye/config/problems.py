"""Make error messages for invalid settings, with location, reason, hint and suggested names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from buckeye.config.settings import KeyPath, Layer, Location, dotted, flag_of
from buckeye.errors import ConfigError

_TASK_FILE_NAMES = {"tasks", "taskset", "task_set", "task_file", "tasks_file", "dataset"}
"""Names for a task file. Flags and arguments call it `dataset`."""
_PREDICATE = re.compile(r"(is|must) ")


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Problem of the setting at `path`, or of the whole configuration if `path` is empty.

    `location` is the file line or the flag that sets the setting. `message` names the setting. If `message`
    begins with "is" or "must", the key is put before it.
    """

    path: KeyPath = ()
    location: Location | None = None
    message: str
    hint: str | None = None
    code: str = "BK-CONFIG-VALUE"

    @property
    def at(self) -> str | None:
        """Location and key: `run.toml:3 (max_steps)` or `--max-steps`.

        None if no file or flag sets the setting, and the message already has the key.
        """
        key = dotted(self.path)
        if self.location is None or self.location.layer is Layer.DEFAULT:
            return key if key and f"`{key}`" not in self._complete_message else None
        location = self.location.text
        if not key or location.replace("_", "-") == flag_of(self.path):
            return location
        return f"{location} ({key})"

    @property
    def error(self) -> ConfigError:
        """The problem as an error."""
        return ConfigError(self._complete_message, code=self.code, at=self.at, hint=self.hint)

    @property
    def _complete_message(self) -> str:
        is_predicate = self.path and _PREDICATE.match(self.message)
        return f"`{dotted(self.path)}` {self.message}" if is_predicate else self.message

    def __str__(self) -> str:
        """Return the message of the error, with location and hint."""
        return str(self.error)


def config_error(problems: Iterable[Problem | ConfigError]) -> ConfigError:
    """Return one error with all problems, without duplicates."""
    errors = [problem.error if isinstance(problem, Problem) else problem for problem in problems]
    errors = list({str(error): error for error in errors}.values())
    if len(errors) == 1:
        return errors[0]
    lines = [f"{len(errors)} problems in the configuration", *(f"  {_indent(str(e))}" for e in errors)]
    codes = {error.code for error in errors}
    return ConfigError("\n".join(lines), code=codes.pop() if len(codes) == 1 else None)


def conflict_problem(
    places: Sequence[tuple[KeyPath, Location | None]],
    message: str,
    *,
    hint: str | None,
    code: str = "BK-CONFIG-CONFLICT",
) -> Problem:
    """Return the problem of settings that conflict.

    `places` are the paths and locations of the settings.
    """
    if len(places) == 1:
        path, location = places[0]
        return Problem(path=path, location=location, message=message, hint=hint, code=code)
    problems = [Problem(path=path, location=location, message="") for path, location in places]
    given = [problem.at or "" for problem in problems if problem.location and problem.location.layer]
    location = Location(", ".join(dict.fromkeys(given)), Layer.FILE) if given else None
    return Problem(location=location, message=message, hint=hint, code=code)


def qualified(text: str, names: Mapping[str, KeyPath]) -> str:
    """Return a text with full keys instead of the setting names in backticks."""
    for name, path in names.items():
        text = text.replace(f"`{name}`", f"`{dotted(path)}`")
    return text


def dataset_name(word: str) -> str | None:
    """Return `dataset` or `eval_dataset` if `word` is another name for this flag or argument, else None."""
    name = word.lower().replace("-", "_")
    prefix = "eval_" if name.startswith("eval_") else ""
    return f"{prefix}dataset" if name.removeprefix(prefix) in _TASK_FILE_NAMES else None


def closest(word: str, known: Iterable[str], *, count: int = 3) -> list[str]:
    """Return the names in `known` that are closest to `word`, best first."""
    names = {name.lower(): name for name in known}
    wanted = word.lower().replace("-", "_")
    if (dataset := dataset_name(word)) in names:
        return [names[dataset]]
    similar = difflib.get_close_matches(wanted, names, n=count, cutoff=0.6)
    initials = "".join(part[:1] for part in wanted.split("_"))
    related = [
        name
        for name in names
        if name == initials or (len(wanted) > 2 and (wanted in name or name in wanted.split("_")))
    ]
    return [names[name] for name in dict.fromkeys([*similar, *related])][:count]


def closest_file(path: Path, others: Iterable[Path]) -> str | None:
    """Return a hint with the file that is closest to a missing one, without regard to suffixes, or None."""
    paths = {other.stem: str(path.parent / other.name) for other in others}
    return suggestion([paths[name] for name in closest(path.stem, paths, count=1)])


def suggestion(names: Sequence[str]) -> str | None:
    """Return a hint that suggests the names, or None without names."""
    return f"did you mean {' or '.join(f'`{name}`' for name in names)}?" if names else None


def did_you_mean(names: Sequence[str]) -> str:
    """Return a sentence that suggests the names, or "" without names."""
    return f" Did you mean {' or '.join(names)}?" if names else ""


def _indent(text: str) -> str:
    return text.replace("\n", "\n  ")
