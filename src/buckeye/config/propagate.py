"""What the processes of a run share is set once and flows to where it is absent.

It is part of the validation of `RLConfig`, and works on raw settings. What is shared follows from the fields
of the classes: every setting of the run that a process has, too. An error is only where two places disagree.
The values of the run itself (`max_steps`, not `trainer.max_steps`) stand over those of its processes if they
come from a higher layer: `--max-steps 5` changes what the files of trainer and orchestrator say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import PurePath
from typing import Any

from buckeye.config.devices import share_devices
from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.config.problems import Problem
from buckeye.config.settings import MISSING, KeyPath, Layer, Place, Settings, dotted, flag_of
from buckeye.config.shared import BaseConfig
from buckeye.config.structure import fields_of, shape_at
from buckeye.config.trainer import LoRAConfig

_ROLES = ("trainer", "orchestrator", "inference")
_LEARNING_ROLES = ("trainer", "orchestrator")
_ELSEWHERE: Mapping[KeyPath, KeyPath] = {("max_model_len",): ("inference", "model", "max_model_len")}
"""Settings of the run that a process has under another name."""
_MAY_DIFFER = ("seq_len",)
"""Rows of the trainer may be longer than rollouts."""
_RECIPES: Mapping[str, Mapping[KeyPath, Any]] = {
    "grpo": {("advantage", "std_norm"): "local"},
    "dapo": {("advantage", "std_norm"): "local", ("zero_spread",): "drop"},
    "rloo": {("advantage", "leave_one_out"): True},
}
"""What goes with a loss of that name in the orchestrator."""
_OWN_FIRST = ("log",)
"""The run's are for processes that say nothing, in whatever layer."""
_IN_PYTHON = Place("given", Layer.FLAG)
_BY_DEFAULT = Place("by default", Layer.VARIABLE)


@dataclass(slots=True)
class Reading:
    """The context of a validation: settings that know where they were written, and, after it, where those
    that are shared disagree."""

    settings: Settings
    problems: list[Problem] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Shared:
    """A setting of the run at `path` that the processes have at `members`.

    `section` says that it is one which can be off. `none` says that None is a value like others; else it says
    nothing. `resolved` says that the run's own gets the value, too, if it is set for a process only.
    """

    path: KeyPath
    members: tuple[KeyPath, ...]
    section: bool
    none: bool
    resolved: bool


@cache
def shared_settings(model: type[BaseConfig]) -> tuple[Shared, ...]:
    """What the class of a run and those of its processes have in common; sections before what is in them."""
    return tuple(_shared(model, model, ()))


def _shared(model: type[BaseConfig], table: type[BaseConfig], above: KeyPath) -> Iterator[Shared]:
    for name, shape in fields_of(table).items():
        path: KeyPath = (*above, name)
        same = [(role, *path) for role in _ROLES]
        members = tuple(p for p in [*same, _ELSEWHERE.get(path)] if p and shape_at(model, p) is not None)
        if not members:
            continue
        default = table.model_fields[name].get_default()
        if not shape.tables:
            none = shape.optional and default is not None
            yield Shared(path, members, section=False, none=none, resolved=bool(above) or default is not None)
            continue
        if all((found := shape_at(model, p)) is not None and found.optional for p in members):
            yield Shared(path, members, section=True, none=False, resolved=False)
        for inner in shape.tables:
            yield from _shared(model, inner, path)


def raw(value: Any) -> Any:
    """Configuration objects as nested dicts of what was set in them."""
    if isinstance(value, BaseConfig):
        names = [n for n in type(value).model_fields if n in value.model_fields_set or n == "type"]
        return {name: raw(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {key: raw(item) for key, item in value.items()}
    return [raw(item) for item in value] if isinstance(value, list) else value


def in_python(values: dict[str, Any]) -> Settings:
    """The settings that a caller of the class hands over."""
    return Settings(raw(values), {(name,): _IN_PYTHON for name in values})


def propagate(model: type[BaseConfig], settings: Settings) -> list[Problem]:
    """Complete the settings of an `rl` run in place, and return where they disagree."""
    _begin_processes(settings)
    _follow_recipe(settings)
    problems = list(_share_resume(settings))
    for shared in shared_settings(model):
        if shared.section:
            problems += _share_section(settings, shared)
        elif shared.path[0] in _OWN_FIRST:
            _fill(settings, _entry(settings, shared.path), shared.members)
        else:
            problems += _share(settings, shared)
    _bound_sequences(settings)
    _make_room_for_adapters(settings)
    return problems + share_devices(settings)


def _begin_processes(settings: Settings) -> None:
    """Trainer and orchestrator are there with their defaults if nobody mentions them; so is inference, where
    nobody mentions the trainer either, nor the servers to use instead."""
    spoken_of = [("trainer",), ("inference",), ("orchestrator", "client")]
    alone = all(settings.get(path) is MISSING for path in spoken_of)
    for role in _ROLES if alone else _LEARNING_ROLES:
        if settings.get((role,)) is MISSING:
            settings.put((role,), {}, _BY_DEFAULT)


def _follow_recipe(settings: Settings) -> None:
    """A loss that is called by a paper's name brings what the paper does in the orchestrator, where nothing
    else is said."""
    loss = _entry(settings, ("trainer", "loss", "type"))
    if loss is None:
        return
    for path, value in _RECIPES.get(str(loss.value), {}).items():
        kind = settings.get(("orchestrator", *path[:-1], "type"))
        if path[:1] != ("advantage",) or kind in (MISSING, "group", "turn"):
            _fill(settings, _Entry(loss.path, value, loss.place), [("orchestrator", *path)])


@dataclass(frozen=True, slots=True)
class _Entry:
    """A value that was set, and where."""

    path: KeyPath
    value: Any
    place: Place

    def __str__(self) -> str:
        return f"{dotted(self.path)} = {_written(self.value)} ({self.place.text})"


def _entry(settings: Settings, path: KeyPath) -> _Entry | None:
    """What is set at `path`, if anything is."""
    value, place = settings.get(path), settings.place(path)
    if value is MISSING or place is None:
        return None
    return _Entry(path, value, place)


def _share_resume(settings: Settings) -> Iterator[Problem]:
    """`resume` is another way to write `ckpt.resume_step = -1`."""
    resume = _entry(settings, ("resume",))
    if resume is None or resume.value is not True:
        return
    newest = _Entry(("ckpt", "resume_step"), -1, resume.place)
    for path in ((role, "ckpt") for role in _LEARNING_ROLES):
        off = _entry(settings, path)
        if off is None or off.value is not None:
            continue
        if resume.place.layer > off.place.layer:
            settings.copy(resume.path, path, {}, resume.place)
        else:
            yield Problem(message=f"{resume} needs checkpoints, and {off} turns them off")
            return
    section = [("ckpt",)] if isinstance(settings.get(("ckpt",)), dict) else []
    owners = [*section, *((role, "ckpt") for role in _LEARNING_ROLES)]
    yield from _impose(settings, newest, [(*owner, "resume_step") for owner in owners])


def _share_section(settings: Settings, shared: Shared) -> Iterator[Problem]:
    """If one process has this optional section, all have; if one has it off, none has."""
    paths = shared.members
    run = _entry(settings, shared.path)
    if run is not None and run.value is None:
        _turn_off(settings, run, paths)
    entries = [e for path in paths if (e := _entry(settings, path)) is not None]
    on = [e for e in entries if isinstance(e.value, dict)]
    if run is not None and isinstance(run.value, dict):
        on.insert(0, run)
    if not on:
        _fill(settings, entries[0] if entries else None, paths)
        return
    for off in (e for e in entries if e.value is None):
        if on[0] is run and on[0].place.layer > off.place.layer:
            settings.copy(on[0].path, off.path, {}, on[0].place)
        else:
            yield _disagreement(off, on[0], shared.path)
    _fill(settings, _Entry(on[0].path, {}, on[0].place), paths)


def _turn_off(settings: Settings, run: _Entry, paths: Sequence[KeyPath]) -> None:
    """None for the whole run turns a section off, unless a process has it on in the same or a higher
    layer."""
    entries = [e for path in paths if (e := _entry(settings, path)) is not None]
    if any(e.value is not None and e.place.layer >= run.place.layer for e in entries):
        return
    for path in paths:
        if _has_room(settings, path):
            settings.copy(run.path, path, None, run.place)


def _share(settings: Settings, shared: Shared) -> Iterator[Problem]:
    run = _entry(settings, shared.path)
    if run is not None and (shared.none or run.value is not None):
        yield from _impose(settings, run, shared.members)
        return
    entries = [entry for path in shared.members if (entry := _entry(settings, path)) is not None]
    if not entries:
        return
    first = entries[0]
    for other in entries[1:]:
        if shared.path[0] not in _MAY_DIFFER and not _same(first.value, other.value):
            yield _disagreement(first, other, shared.path)
    _fill(settings, first, shared.members)
    section = shared.path[:-1]
    if shared.resolved and (not section or isinstance(settings.get(section), dict)):
        _fill(settings, first, [shared.path])


def _impose(settings: Settings, run: _Entry, members: Sequence[KeyPath]) -> Iterator[Problem]:
    """Give the value of the run to all members; one that was set otherwise in the same or a higher layer
    disagrees."""
    for path in members:
        member = _entry(settings, path)
        if member is None or _same(run.value, member.value):
            continue
        if run.place.layer > member.place.layer:
            settings.copy(run.path, path, run.value, run.place)
        else:
            yield _disagreement(run, member, run.path)
            return
    _fill(settings, run, members)


def _fill(settings: Settings, source: _Entry | None, members: Sequence[KeyPath]) -> None:
    """Set the members that are absent. What holds them may have to be made, but never a process's section,
    and nothing that was set to something else."""
    if source is None:
        return
    for path in members:
        if settings.get(path) is MISSING and _has_room(settings, path):
            settings.copy(source.path, path, source.value, source.place)


def _has_room(settings: Settings, path: KeyPath) -> bool:
    above = [settings.get(path[:length]) for length in range(1, len(path))]
    if path[0] in _ROLES and above[0] is MISSING:
        return False
    return all(value is MISSING or isinstance(value, dict) for value in above)


def _same(one: Any, other: Any) -> bool:
    """Whether two raw values mean the same: "5" is 5, and `a/` is `a`."""
    if isinstance(one, str) and isinstance(other, str):
        return PurePath(one) == PurePath(other)
    return one == other or str(one) == str(other)


def _disagreement(one: _Entry, other: _Entry, run: KeyPath) -> Problem:
    return Problem(message=f"{one} and {other} must be the same. Set it once, e.g. with {flag_of(run)}.")


def _bound_sequences(settings: Settings) -> None:
    """Engines need room for the longest rollout and no more."""
    path = ("orchestrator", "seq_len")
    default = OrchestratorConfig.model_fields["seq_len"].default
    longest = _entry(settings, path) or _Entry(path, default, _BY_DEFAULT)
    _fill(settings, longest, [("inference", "model", "max_model_len")])


def _make_room_for_adapters(settings: Settings) -> None:
    """Engines must take the adapters that the trainer trains."""
    lora = _entry(settings, ("trainer", "model", "experimental", "lora"))
    if lora is None or not isinstance(lora.value, dict):
        return
    default = _Entry(lora.path, LoRAConfig.model_fields["rank"].default, lora.place)
    rank = _entry(settings, (*lora.path, "rank")) or default
    _fill(settings, rank, [("inference", "max_lora_rank")])


def _written(value: Any) -> str:
    if isinstance(value, dict):
        return "{...}"
    return f'"{value}"' if isinstance(value, str) else str(value)
