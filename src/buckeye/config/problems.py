"""Problems of settings as messages: where, what, what to do, and suggested names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from buckeye.config.settings import KeyPath, Location, dotted, flag_of
from buckeye.errors import ConfigError

Level = Literal["error", "warning"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Problem of the setting at `path` (empty: of the whole configuration), written at `location` if it was
    written. A warning does not stop the run. `code` and `hint` are those of the error.
    """

    path: KeyPath = ()
    location: Location | None = None
    message: str
    hint: str | None = None
    code: str = "BK-CONFIG-VALUE"
    level: Level = "error"

    @property
    def at(self) -> str | None:
        """Where it was written, with its key: `run.toml:3 (max_steps)` or `--max-steps`; None if nowhere."""
        where, key = self.location.text if self.location is not None else None, dotted(self.path)
        if where is None or not key or where.replace("_", "-") == flag_of(self.path):
            return where or key or None
        return f"{where} ({key})"

    def __str__(self) -> str:
        """Return one message: where, what, what to do."""
        return str(_error(self))


def config_error(problems: Iterable[Problem | ConfigError]) -> ConfigError:
    """Return one error for all problems, each once. Several are listed, one per paragraph."""
    found = (_error(one) if isinstance(one, Problem) else one for one in problems)
    errors = list({str(error): error for error in found}.values())
    if len(errors) == 1:
        return errors[0]
    lines = [f"{len(errors)} problems in the configuration", *(f"  {_indent(str(e))}" for e in errors)]
    codes = {error.code for error in errors}
    return ConfigError("\n".join(lines), code=codes.pop() if len(codes) == 1 else None)


def _error(problem: Problem) -> ConfigError:
    return ConfigError(problem.message, code=problem.code, at=problem.at, hint=problem.hint)


def _indent(text: str) -> str:
    return text.replace("\n", "\n  ")


_FILE_OF_TASKS = {"tasks", "taskset", "task_set", "task_file", "tasks_file", "dataset"}
"""Names for a task file. Flags and arguments call it `dataset`."""


def dataset_name(word: str) -> str | None:
    """Return `dataset` or `eval_dataset` if a flag or an argument of this name would be a file of tasks."""
    name = word.lower().replace("-", "_")
    which = "eval_" if name.startswith("eval_") else ""
    return f"{which}dataset" if name.removeprefix(which) in _FILE_OF_TASKS else None


def closest(word: str, known: Iterable[str], *, count: int = 3) -> list[str]:
    """Return the names in `known` that are closest to `word`, best first."""
    names = {name.lower(): name for name in known}
    wanted = word.lower().replace("-", "_")
    if (dataset := dataset_name(word)) in names:
        return [names[dataset]]
    found = difflib.get_close_matches(wanted, names, n=count, cutoff=0.6)
    initials = "".join(part[:1] for part in wanted.split("_"))
    kin = [n for n in names if n == initials or (len(wanted) > 2 and (wanted in n or n in wanted.split("_")))]
    return [names[name] for name in dict.fromkeys([*found, *kin])][:count]


def did_you_mean(names: Sequence[str]) -> str:
    """Return a sentence that suggests the names; "" without any."""
    return f" Did you mean {' or '.join(names)}?" if names else ""
