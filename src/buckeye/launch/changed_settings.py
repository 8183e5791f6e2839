"""Settings of a run that differ from those of its newest attempt, and the history of these changes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from buckeye.base.storage import read_json, write_file
from buckeye.config.load import to_json
from buckeye.config.rl import RLConfig
from buckeye.config.structure import drop_unknown, shape_of
from buckeye.errors import UsageError
from buckeye.monitor.redact import redact
from buckeye.run_files.record import RunRecord, read_record

RECORDED_CONFIG = Path("configs", "rl.json")
"""Path of the recorded configuration in the run directory.

The first start of a run writes the file. A later start replaces it once all its processes are ready, or when
the user stops it before that.
"""

_START_SETTINGS = {"clean", "dry_run", "output_dir", "resume", "resume_step"}
"""Settings that affect how or where a run starts, and not its result."""

_WITH_COLOCATE = ("inference_gpu_ids", "trainer_gpu_ids", "max_async_level")
_WITH_OFFLOAD = ("colocate_offload", "kv_cache_gb", "gpu_memory_utilization")
"""Settings that the launcher chooses for a colocated run. The names are without their sections."""


@dataclass(frozen=True, slots=True)
class SettingChange:
    """Setting that a resume at `step` changed. The steps after `step` ran with `new`."""

    step: int
    key: str
    old: Any
    new: Any


def record_config(config: RLConfig, *, since: int | None = None) -> None:
    """Write the configuration to the run directory as the configuration of the run.

    `since` is the step at which the run was resumed. If the steps before `since` ran with other settings,
    their configuration is kept in another file.
    """
    if since is not None:
        _keep_former_config(config, since)
    write_file(config.output_dir / RECORDED_CONFIG, to_json(to_recorded_form(config)), mode=0o600)


def _keep_former_config(config: RLConfig, since: int) -> None:
    output_dir, kept = config.output_dir, config.output_dir / former_config(since)
    discarded = [path for step, path in former_configs(output_dir).items() if step >= since]
    current = to_recorded_form(config).model_dump(mode="json")
    try:
        former = _completed(read_json(next(iter(discarded), output_dir / RECORDED_CONFIG)))
    except (OSError, ValueError):  # `changed_settings` has already reported the unreadable file
        former = current
    if since and compare_settings(former, current):
        write_file(kept, json.dumps(former, indent=2, ensure_ascii=False) + "\n", mode=0o600)
        discarded = [path for path in discarded if path != kept]
    for path in discarded:
        path.unlink(missing_ok=True)


def former_config(step: int) -> Path:
    """Return where the run directory keeps the configuration of the steps before `step`."""
    return RECORDED_CONFIG.with_name(f"rl_before_step_{step}.json")


def former_configs(output_dir: Path) -> dict[int, Path]:
    """Return the paths of the replaced configurations of a run, by the step of the resume that replaced each.

    The steps are in ascending order.
    """
    folder = output_dir / RECORDED_CONFIG.parent
    paths = {path.stem.rpartition("_")[2]: path for path in folder.glob("rl_before_step_*.json")}
    return {int(step): paths[step] for step in sorted(filter(str.isdecimal, paths), key=int)}


def settings_history(output_dir: Path) -> list[SettingChange]:
    """Return the changes of settings by resumes, in order, without secrets.

    A setting that several processes share appears once. Unreadable files are skipped.
    """
    configs = []
    for step, path in [*former_configs(output_dir).items(), (0, output_dir / RECORDED_CONFIG)]:
        try:
            configs.append((step, _completed(read_json(path))))
        except (OSError, ValueError):
            continue
    return [
        SettingChange(step, key, old, new)
        for (step, former), (_, later) in pairwise(configs)
        for key, old, new in distinct_changes(compare_settings(former, later))
    ]


def distinct_changes(changes: list[tuple[str, Any, Any]]) -> list[tuple[str, Any, Any]]:
    """Return the changes, with only the first of equal changes of a setting that several processes share."""
    found: dict[tuple[str, str, str], tuple[str, Any, Any]] = {}
    for key, old, new in changes:
        found.setdefault((key.partition(".")[2] or key, repr(old), repr(new)), (key, old, new))
    return list(found.values())


def read_earlier_start(output_dir: Path) -> RunRecord | None:
    """Return the record of an earlier start of the run.

    Returns None if the record is missing or unreadable, or if the recorded configuration is missing.
    """
    if not (output_dir / RECORDED_CONFIG).exists():
        return None
    try:
        return read_record(output_dir)
    except UsageError:
        return None


def to_recorded_form(config: RLConfig) -> RLConfig:
    """Return the configuration in the form in which it is recorded.

    Model directories are absolute paths. `clean` is off, so that a start from the record deletes nothing.
    """
    changes: dict[str, Any] = {"clean": False}
    for name in ("trainer", "orchestrator", "inference"):
        section = getattr(config, name)
        if section is not None:
            changes[name] = section.model_copy(update={"model": _absolute(section.model)})
    if config.model is not None:
        changes["model"] = _absolute(config.model)
    return config.model_copy(update=changes)


def changed_settings(output_dir: Path, config: RLConfig) -> list[str]:
    """Return one line `KEY: OLD -> NEW` per setting that had another value in the newest attempt.

    Secrets, and values that the launcher chooses because a setting is `auto`, are not compared. Raises
    UsageError if the recorded configuration cannot be read.
    """
    path = output_dir / RECORDED_CONFIG
    try:
        recorded = read_json(path)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot read the recorded settings of the run: {error}",
            code="BK-FILE-UNREADABLE",
            at=str(path),
            hint="restore this file, or start a new run in another `--output-dir`",
        ) from error
    former, current = _completed(recorded), to_recorded_form(config).model_dump(mode="json")
    chosen = _chosen_settings(former, current)
    changes = [
        change
        for change in compare_settings(former, current)
        if not any(part in chosen for part in change[0].split(".")) and not _is_lost_model(*change)
    ]
    return [f"{key}: {json.dumps(old)} -> {json.dumps(new)}" for key, old, new in distinct_changes(changes)]


def _is_lost_model(key: str, former: Any, current: Any) -> bool:
    """Return True for the relative path of a model that was moved or deleted since the start of the run."""
    return key.split(".")[-2:] == ["model", "name"] and former == os.path.abspath(str(current))


def _chosen_settings(former: Mapping[str, Any], current: Mapping[str, Any]) -> set[str]:
    """Return the names of the settings that the launcher chose in `former`."""
    is_colocated, is_auto = former.get("colocate") is True, current["colocate"] == "auto"
    chosen = {"colocate"} if is_auto else set[str]()
    if is_colocated and is_auto:
        chosen.update(_WITH_COLOCATE)
    if is_colocated and current["colocate_offload"] == "auto":
        chosen.update(_WITH_OFFLOAD)
    gpus, others = former.get("inference_gpu_ids"), former.get("trainer_gpu_ids")
    is_shared = isinstance(gpus, list) and isinstance(others, list) and any(gpu in others for gpu in gpus)
    if is_shared and (current["inference"] or {}).get("kv_cache_gb") is None:
        chosen.add("kv_cache_gb")  # of vLLM next to a trainer
    return chosen


def compare_settings(settings: Any, others: Any) -> list[tuple[str, Any, Any]]:
    """Return the settings that differ between two runs, as (key, value, other value).

    Secrets, and settings that affect only how or where a run starts, are not compared.
    """
    differences = _differences(redact(settings), redact(others), ())
    return [(".".join(key), value, other) for key, value, other in differences]


def _completed(recorded: Any) -> Any:
    """Return settings of an older version, with defaults for new settings and without removed ones."""
    drop_unknown(shape_of(RLConfig), recorded)
    try:
        return RLConfig.model_validate(recorded).model_dump(mode="json")
    except ValidationError:  # the version is too old for today's settings
        return recorded


def _absolute(model: Any) -> Any:
    if not Path(model.name).exists():  # a name on the hub
        return model
    return model.model_copy(update={"name": str(Path(model.name).resolve())})


def _differences(old: Any, new: Any, key: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    old, new = _by_key(old), _by_key(new)
    name = key[-1] if key else ""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for inner in dict.fromkeys([*old, *new]):
            yield from _differences(old.get(inner), new.get(inner), (*key, inner))
    elif name in _START_SETTINGS or (name == "ckpt" and None in (old, new)):  # resuming enables checkpoints
        return
    elif old != new:
        yield key, old, new


def _by_key(value: Any) -> Any:
    """Return a list as a mapping by index, so that a change of one entry is reported for this entry only."""
    return {str(index): item for index, item in enumerate(value)} if isinstance(value, list) else value
