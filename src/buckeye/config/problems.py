"""Problems of settings as messages: where, what, what to do, and suggested names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from buckeye.config.settings import KeyPath, Place, dotted, flag_of

Level = Literal["error", "warning"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Problem of the setting at `path` (empty: of the whole configuration), written at `place` if it was
    written. A warning does not stop the run.
    """

    path: KeyPath = ()
    place: Place | None = None
    message: str
    level: Level = "error"

    def __str__(self) -> str:
        """Return one message: where, what, what to do."""
        where = self.place.text if self.place is not None else None
        if where is not None and where.replace("_", "-") == flag_of(self.path):
            return f"{where}: {self.message}"
        return ": ".join(part for part in (where, dotted(self.path), self.message) if part)


def report(problems: Iterable[Problem]) -> str:
    """Return all problems as one text, each once, one paragraph each."""
    texts = list(dict.fromkeys(map(str, problems)))
    if len(texts) == 1:
        return texts[0]
    return "\n".join([f"{len(texts)} problems in the configuration", *(f"  {_indent(t)}" for t in texts)])


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
