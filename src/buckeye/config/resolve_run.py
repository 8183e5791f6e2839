"""Resolve the configuration of a run: copy settings that its processes share to each process.

`SHARED` lists these settings. A value of the run (`max_steps`) replaces the values of its processes
(`trainer.max_steps`) if it comes from a higher layer. So `--max-steps 5` overrides the files of trainer and
orchestrator. Two different values in one layer are an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from buckeye.config.devices import reconcile_devices
from buckeye.config.flags import Assignment
from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.config.problems import Problem, conflict_problem
from buckeye.config.settings import BY_DEFAULT, MISSING, KeyPath, Settings, flag_of
from buckeye.config.shared import BaseConfig, CheckpointConfig, WandbConfig, WandbExtrasConfig
from buckeye.config.trainer import LoRAConfig

_TRAINING = ("trainer", "orchestrator")
_ALL = (*_TRAINING, "inference")

SECTIONS: Mapping[str, tuple[str, ...]] = dict.fromkeys(("ckpt", "wandb", "wandb.log_extras"), _TRAINING)
"""Optional sections, and their processes. A section is on for all of its processes, or off for all."""


def _fields(section: str, model: type[BaseConfig]) -> dict[str, tuple[str, ...]]:
    names = (f"{section}.{name}" for name in model.model_fields)
    return {name: _TRAINING for name in names if name not in SECTIONS}


SHARED: Mapping[str, tuple[str, ...]] = {
    "output_dir": _ALL,
    "model.name": _ALL,
    "log.level": _ALL,
    "max_steps": _TRAINING,
    "max_async_level": _TRAINING,
    "max_off_policy_steps": _TRAINING,
    "seq_len": _TRAINING,
    **_fields("ckpt", CheckpointConfig),
    **_fields("wandb", WandbConfig),
    **_fields("wandb.log_extras", WandbExtrasConfig),
}
"""Settings of the run, and the processes that have a setting with the same name."""
_MAY_DIFFER = ("log.level", "seq_len")
"""Settings that may differ between processes.

Each process may have its own log level. The rows of the trainer (`seq_len`) may be longer than rollouts.
"""
_NONE_IS_A_VALUE = ("ckpt.interval", "ckpt.keep")
_LOSS_SETTINGS: Mapping[str, Mapping[KeyPath, Any]] = {
    "grpo": {("advantage", "std_norm"): "local"},
    "dapo": {("advantage", "std_norm"): "local", ("zero_spread",): "drop"},
    "rloo": {("advantage", "leave_one_out"): True, ("max_async_level",): 0},
    "reinforce": {("max_async_level",): 0},
}
"""Settings of the orchestrator in the paper of a loss, by loss."""
_SERVERS: KeyPath = ("orchestrator", "client", "base_url")
_MAX_MODEL_LEN: KeyPath = ("inference", "model", "max_model_len")


def resolve_run(settings: Settings) -> list[Problem]:
    """Complete the settings of a run of `rl` in place, and return the conflicts between settings."""
    _add_processes(settings)
    _apply_loss_recipe(settings)
    colocate = _entry(settings, ("colocate",))
    if colocate is not None and colocate.value is True:  # engine and trainer take turns
        _fill(settings, Assignment(colocate.path, 0, colocate.location), [("max_async_level",)])
    problems = list(_share_resume(settings))
    for name, roles in SECTIONS.items():
        problems += _share_section(settings, *_paths(name, roles))
    for name, roles in SHARED.items():
        problems += _share(settings, name, *_paths(name, roles))
    max_model_len = _entry(settings, ("max_model_len",))
    if max_model_len is not None and max_model_len.value is not None:
        problems += _impose(settings, max_model_len, [_MAX_MODEL_LEN])
    _fit_engines(settings)
    return problems + reconcile_devices(settings)


def _paths(name: str, roles: Sequence[str]) -> tuple[KeyPath, list[KeyPath]]:
    path: KeyPath = tuple(name.split("."))
    return path, [(role, *path) for role in roles]


def _add_processes(settings: Settings) -> None:
    """Add the sections of missing processes.

    If `orchestrator.client.base_url` is set, the run uses other servers, so no section `inference` is added.
    """
    for role in _TRAINING if settings.has(_SERVERS) else _ALL:
        if not settings.has((role,)):
            settings.put((role,), {}, BY_DEFAULT)


def _apply_loss_recipe(settings: Settings) -> None:
    loss = _entry(settings, ("trainer", "loss", "type"))
    if loss is None:
        return
    for path, value in _LOSS_SETTINGS.get(str(loss.value), {}).items():
        kind = settings.get(("orchestrator", *path[:-1], "type"))
        if path[0] == "advantage" and kind not in (MISSING, "group", "turn"):
            continue
        if not _entries(settings, [path, ("trainer", *path)]):  # the run or the trainer may set it too
            _fill(settings, Assignment(loss.path, value, loss.location), [("orchestrator", *path)])


def _entry(settings: Settings, path: KeyPath) -> Assignment | None:
    value, location = settings.get(path), settings.location(path)
    return None if value is MISSING or location is None else Assignment(path, value, location)


def _entries(settings: Settings, paths: Sequence[KeyPath]) -> list[Assignment]:
    return [entry for path in paths if (entry := _entry(settings, path)) is not None]


def _share_resume(settings: Settings) -> Iterator[Problem]:
    """Set `ckpt.resume_step` to -1 if `resume` is true, and turn checkpoints on."""
    resume = _entry(settings, ("resume",))
    if resume is None or resume.value is not True:
        return
    owners: list[KeyPath] = [(role, "ckpt") for role in _TRAINING]
    for off in _entries(settings, owners):
        if off.value is None and resume.location.layer <= off.location.layer:
            message = f"{resume} requires checkpoints, and {off} turns them off"
            places = [(entry.path, entry.location) for entry in (resume, off)]
            yield conflict_problem(places, message, hint="turn checkpoints on, or leave `resume` out")
            return
        if off.value is None:
            settings.put(off.path, {}, resume.location)
    newest = Assignment(("ckpt", "resume_step"), -1, resume.location)
    if isinstance(settings.get(("ckpt",)), dict):
        owners.insert(0, ("ckpt",))
    yield from _impose(settings, newest, [(*owner, "resume_step") for owner in owners])


def _share_section(settings: Settings, path: KeyPath, members: Sequence[KeyPath]) -> Iterator[Problem]:
    """Turn an optional section on or off for all processes, if the run or one process sets it."""
    run, entries = _entry(settings, path), _entries(settings, members)
    if run is not None and run.value is None and all(_is_below(e, run) for e in entries):
        for member in members:
            if _can_set(settings, member):
                settings.put(member, None, run.location)
        return
    on = [e for e in (run, *entries) if e is not None and isinstance(e.value, dict)]
    if not on:
        _fill(settings, entries[0] if entries else None, members)
        return
    for off in (e for e in entries if e.value is None):
        if on[0] is run and on[0].location.layer > off.location.layer:
            settings.put(off.path, {}, on[0].location)
        else:
            yield _difference(off, on[0], path)
    _fill(settings, Assignment(on[0].path, {}, on[0].location), members)


def _is_below(entry: Assignment, run: Assignment) -> bool:
    return entry.value is None or entry.location.layer < run.location.layer


def _share(settings: Settings, name: str, path: KeyPath, members: Sequence[KeyPath]) -> Iterator[Problem]:
    run, entries = _entry(settings, path), _entries(settings, members)
    if name == "log.level":
        _fill(settings, run, members)
    elif run is not None and (run.value is not None or name in _NONE_IS_A_VALUE):
        yield from _impose(settings, run, members)
    elif entries:
        for other in entries[1:]:
            if name not in _MAY_DIFFER and not _is_same(entries[0].value, other.value):
                yield _difference(entries[0], other, path)
        _fill(settings, entries[0], members)
        if name == "output_dir" or isinstance(settings.get(path[:-1] or ("",)), dict):
            _fill(settings, entries[0], [path])


def _impose(settings: Settings, run: Assignment, members: Sequence[KeyPath]) -> Iterator[Problem]:
    """Set the value of the run for all `members`, the paths of the setting in the processes.

    Yield a conflict if a member has another value from an equal or higher layer.
    """
    for member in _entries(settings, members):
        if _is_same(run.value, member.value):
            continue
        if run.location.layer <= member.location.layer:
            yield _difference(run, member, run.path)
            return
        settings.put(member.path, run.value, run.location)
    _fill(settings, run, members)


def _fill(settings: Settings, source: Assignment | None, members: Sequence[KeyPath]) -> None:
    """Set the members without a value, if their section exists or can be created."""
    for path in members:
        if source is not None and settings.get(path) is MISSING and _can_set(settings, path):
            settings.put(path, source.value, source.location)


def _can_set(settings: Settings, path: KeyPath) -> bool:
    """Return True if the sections above a path are on or can be created.

    The section of a process, such as `inference`, cannot be created.
    """
    above = [settings.get(path[:length]) for length in range(1, len(path))]
    if path[0] in _ALL and above[0] is MISSING:
        return False
    return all(value is MISSING or isinstance(value, dict) for value in above)


def _is_same(first: Any, second: Any) -> bool:
    """Return True if two raw values mean the same value, such as "5" and 5, or `a/` and `a`."""
    if isinstance(first, str) and isinstance(second, str):
        return PurePath(first) == PurePath(second)
    return first == second or str(first) == str(second)


def _difference(first: Assignment, second: Assignment, run: KeyPath) -> Problem:
    places = [(entry.path, entry.location) for entry in (first, second)]
    message, hint = f"{first} and {second} must be equal", f"set both with `{flag_of(run)}`"
    return conflict_problem(places, message, hint=hint)


def _fit_engines(settings: Settings) -> None:
    """Set the limits of the engines, so that they fit the longest rollout, and adapters and their base."""
    default = OrchestratorConfig.model_fields["seq_len"].default
    seq_len = _entry(settings, ("orchestrator", "seq_len"))
    _fill(settings, seq_len or Assignment((), default, BY_DEFAULT), [_MAX_MODEL_LEN])
    lora = _entry(settings, ("trainer", "model", "experimental", "lora"))
    if lora is not None and isinstance(lora.value, dict):
        default_rank = Assignment(lora.path, LoRAConfig.model_fields["rank"].default, lora.location)
        rank = _entry(settings, (*lora.path, "rank")) or default_rank
        _fill(settings, rank, [("inference", "max_lora_rank")])
    quantization = _entry(settings, ("trainer", "model", "quantization"))
    if quantization is not None and quantization.value is not None:
        _fill(settings, quantization, [("inference", "model", "quantization")])
        torch = Assignment(quantization.path, "torch", quantization.location)
        _fill(settings, torch, [("inference", "backend")])
