"""What was played, one rollout after another, without secrets: what all formats are written from."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from buckeye import runs
from buckeye.monitor.redact import redacted
from buckeye.monitor.rollouts import PlayedRollout
from buckeye.runs.checkpoint_facts import public_name
from buckeye.runs.frames import COLUMNS

ROW = tuple(COLUMNS["rollouts"])
_QUERY = (
    f"SELECT path, at, bytes, {', '.join('grp' if name == 'group' else name for name in ROW)} "  # noqa: S608  our own names
    "FROM rollouts WHERE step BETWEEN ? AND ? ORDER BY split DESC, step, env, grp, number, at"
)
_UNSAFE = re.compile(r"[^\w.\-]+")
_TRUTHS = ("truncated", "cut", "retried")


@dataclass(frozen=True, slots=True)
class Played:
    """A rollout: `row` has the columns of `buckeye.runs`' frame `rollouts`, and `rollout` its texts; None
    where these were deleted."""

    row: dict[str, Any]
    rollout: PlayedRollout | None

    @property
    def place(self) -> tuple[str, int, str]:
        """Which evaluation or batch it is of."""
        return self.row["split"], self.row["step"], self.row["env"]


class Source(Protocol):
    """Where rollouts come from. `model` is what played; `unreadable` fills with what was left out."""

    @property
    def name(self) -> str: ...

    @property
    def model(self) -> str: ...

    @property
    def unreadable(self) -> list[str]: ...

    def played(self, splits: Sequence[str], steps: range | None) -> Iterator[Played]:
        """Those of some splits (`train`, `eval`) and steps, in order."""


@dataclass(frozen=True, slots=True)
class OwnRun:
    """A run of `rl`."""

    run: runs.Run

    @property
    def name(self) -> str:
        return self.run.path.absolute().name

    @property
    def model(self) -> str:
        named = self.run.setting("trainer.model.name") or self.run.setting("model.name")
        return public_name(str(named)) if named else "unknown"

    @property
    def unreadable(self) -> list[str]:
        return left_out(self.run)

    def played(self, splits: Sequence[str], steps: range | None) -> Iterator[Played]:
        first, last = (steps.start, steps.stop - 1) if steps is not None else (0, 2**62)
        for path, at, size, *values in self.run.index.execute(_QUERY, (first, last)):
            row = dict(zip(ROW, values, strict=True))
            if row["split"] in splits:
                rollout = self.run.text_at(path, at, size, row["group"], row["number"])
                yield without_secrets(row, rollout)


def left_out(run: runs.Run) -> list[str]:
    """What of a run could not be read so far."""
    lines = run.query("SELECT path, unreadable FROM files WHERE unreadable > 0")
    return [*run.unreadable, *(f"{path}: {count} lines that are no rollouts" for path, count in lines)]


def without_secrets(row: dict[str, Any], rollout: PlayedRollout | None) -> Played:
    """Both without keys, and without halves of characters, which no format can hold."""
    row = {
        name: bool(value) if name in _TRUTHS and value is not None else value for name, value in row.items()
    }
    both = json.dumps(redacted([row, msgspec.to_builtins(rollout)]), ensure_ascii=False)
    row, values = json.loads(both.encode(errors="replace"))
    return Played(row, msgspec.convert(values, PlayedRollout | None))


def file_name(name: str, taken: set[str]) -> str:
    """A name like `name` that a file may have, and none has that is `taken`, to which it is added."""
    safe, number = _UNSAFE.sub("_", name), 1
    found = safe
    while found.casefold() in taken:
        number += 1
        found = f"{safe}~{number}"
    taken.add(found.casefold())
    return found
