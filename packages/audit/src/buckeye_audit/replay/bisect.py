"""The first step between a good and a bad one at which this code, or these settings, compute something else
than the run has recorded.

Whoever starts at a checkpoint computes all steps up to the next one. So the search is among the checkpoints,
and the first difference on the way from the right one is the answer. Steps whose weights alone are there are
computed one by one, as far as their gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from buckeye import runs
from buckeye.base.storage import step_directories
from buckeye.config.load import load_config
from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.config.trainer import TrainerConfig
from buckeye.errors import UsageError
from buckeye.inference.render import ChatRenderer
from buckeye.transport.checkpoint import verify_checkpoint
from buckeye_audit.replay.bundle import INDEX
from buckeye_audit.replay.samples import BatchAgain
from buckeye_audit.replay.step import (
    Comparison,
    Replay,
    Stage,
    Start,
    chain,
    nearest,
    published,
    require_kept,
    start_of,
    starts,
)


@dataclass(frozen=True)
class _Part:
    """Steps that are computed in one go, up to `last`; `first` is the first of those that are looked for."""

    start: Start
    until: Stage
    first: int
    last: int


@dataclass
class Search:
    """A search, and in the end the replay that tells what it has found. `not_looked_at` are steps that cannot
    be computed; of those in `as_recorded` tokens, rewards and advantages were not made again."""

    run: Path
    config: TrainerConfig
    batches: BatchAgain
    scratch: Path
    replays: int = 0
    found: Replay | None = None
    not_looked_at: list[int] = field(default_factory=list)
    as_recorded: list[int] = field(default_factory=list)

    @property
    def kept(self) -> list[int]:
        """The steps of which the batch was kept. Raises UsageError if there is none."""
        steps = list(step_directories(self.run / "trained"))
        if not steps:
            require_kept(self.run, 0)
        return steps

    def between(self, good: int, bad: int) -> None:
        """Look at the steps after `good` up to `bad`. Raises UsageError where none can be computed."""
        parts = self._parts(range(good + 1, bad + 1))
        low, high = 0, len(parts)
        while low < high:
            middle = (low + high) // 2
            found = self._replay(parts[middle])
            first = found.first_unexplained
            if first is None:
                low = middle + 1
                continue
            self.found, high = found, middle
            if first.step > found.start.step:
                break  # all before it on the way are the same

    def only(self, step: int) -> None:
        """Look at one step, and at those on the way to it. Raises UsageError if it cannot be computed."""
        self.found = self._replay(self._parts(range(step, step + 1))[0])

    def _replay(self, part: _Part) -> Replay:
        self.replays += 1
        if part.start.checkpoint is not None:
            verify_checkpoint(part.start.checkpoint)
        scratch = self.scratch / str(self.replays)
        scratch.mkdir()
        return chain(
            self.run,
            self.config,
            part.start,
            range(part.start.step, part.last + 1),
            until=part.until,
            device=None,
            scratch=scratch,
            before=self._before,
            to_the_end=False,
        )

    def _before(self, step: int) -> Sequence[Comparison]:
        found = self.batches.compared(step)
        if not found:
            self.as_recorded.append(step)
        return found

    def _parts(self, steps: range) -> list[_Part]:
        require_kept(self.run, steps[-1])
        kept, known, found = (
            set(step_directories(self.run / "trained")),
            starts(self.run, self.config),
            list[_Part](),
        )
        for step in steps:
            start = nearest(known, kept, step) if step in kept else None
            alone = published(self.run, step) if step in kept and start is None else None
            if start is not None and found and found[-1].start == start:
                found[-1] = replace(found[-1], last=step)
            elif (begins := start or alone) is not None:
                found.append(_Part(begins, "weights" if start else "gradient", step, step))
            else:
                self.not_looked_at.append(step)
        if not found:
            start_of(self.run, self.config, steps[-1], until="weights")  # says what is there
        return found


def departure(values: Mapping[int, float], good: int, bad: int) -> int:
    """The first step after `good` from which on every value is nearer to that of `bad` than to that of
    `good`. Raises UsageError where one of the two has no value, or both have the same."""
    there = f"There are values of steps {min(values)} to {max(values)}." if values else "There are none."
    for step in (good, bad):
        if step not in values:
            raise UsageError(f"--metric has no value at step {step}. {there}")
    if values[good] == values[bad]:
        raise UsageError(
            f"--metric is {values[good]:g} at step {good} and at step {bad}: it does not depart."
        )
    found = bad
    for step in sorted((step for step in values if good < step < bad), reverse=True):
        if abs(values[step] - values[bad]) >= abs(values[step] - values[good]):
            break
        found = step
    return found


def search_of(run: Path, config: TrainerConfig, changes: Sequence[str], scratch: Path) -> Search:
    """A search in the run or opened bundle in a directory; `config` is the trainer's, `changes` are flags for
    the orchestrator's settings."""
    settings = load_config(OrchestratorConfig, ["@", str(run / "configs" / "orchestrator.json"), *changes])
    named = [config.model.name] if (run / INDEX).is_file() else [settings.model.name, config.model.name]
    there = [*map(Path, named), *reversed(step_directories(run / "weights").values())]
    model = next((path for path in there if (path / "tokenizer_config.json").is_file()), None)
    renderer = ChatRenderer(model) if model is not None else None
    return Search(run, config, BatchAgain(runs.open(run), settings, renderer), scratch)
