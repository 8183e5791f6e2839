"""What has changed in the configuration of a run since its newest attempt was started."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from buckeye.base.storage import read_json, write_file
from buckeye.config.load import to_json
from buckeye.config.rl import RLConfig
from buckeye.config.structure import drop_unknown, shape_of
from buckeye.errors import UsageError
from buckeye.monitor.redact import redacted
from buckeye.run_files.record import RunRecord, read_record

RECORDED_CONFIG = Path("configs", "rl.json")
"""The resolved configuration of the newest attempt whose processes could begin, in the run directory."""

_OF_A_START = {"clean", "dry_run", "output_dir", "resume", "resume_step"}
"""Settings that say how or where a run is started, and not what it is."""


def record_config(config: RLConfig) -> None:
    """Write the configuration down as that of the run."""
    write_file(config.output_dir / RECORDED_CONFIG, to_json(as_recorded(config)), mode=0o600)


def earlier_start(output_dir: Path) -> RunRecord | None:
    """The record of a run that has its configuration beside it; None where either cannot be gone on with."""
    if not (output_dir / RECORDED_CONFIG).exists():
        return None
    try:
        return read_record(output_dir)
    except UsageError:
        return None


def as_recorded(config: RLConfig) -> RLConfig:
    """The configuration as it is kept: a model's directory by its absolute path, and without `clean`, so that
    a start from the record deletes nothing."""
    changes: dict[str, Any] = {"clean": False}
    for name in ("trainer", "orchestrator", "inference"):
        section = getattr(config, name)
        if section is not None:
            changes[name] = section.model_copy(update={"model": _absolute(section.model)})
    if config.model is not None:
        changes["model"] = _absolute(config.model)
    return config.model_copy(update=changes)


def changed_settings(output_dir: Path, config: RLConfig) -> list[str]:
    """One line for every setting of `config` that the newest attempt of the run in `output_dir` had
    otherwise; secrets are not compared. Raises UsageError if what it had cannot be read."""
    path = output_dir / RECORDED_CONFIG
    try:
        recorded = read_json(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    now = as_recorded(config).model_dump(mode="json")
    return [
        f"{key}: {json.dumps(old)} in the run, {json.dumps(new)} now"
        for key, old, new in settings_apart(_completed(recorded), now)
    ]


def settings_apart(these: Any, others: Any) -> list[tuple[str, Any, Any]]:
    """The settings of two runs that differ, by their keys; secrets are not compared, nor what says how or
    where a run is started."""
    found = _differences(redacted(these), redacted(others), ())
    return [(".".join(key), this, other) for key, this, other in found]


def _completed(recorded: Any) -> Any:
    """Return the settings with the defaults of those that an earlier version did not have yet, and without
    those that no longer exist."""
    drop_unknown(shape_of(RLConfig), recorded)
    try:
        return RLConfig.model_validate(recorded).model_dump(mode="json")
    except ValidationError:  # of a version whose settings are no longer known
        return recorded


def _absolute(model: Any) -> Any:
    here = Path(model.name).exists()  # else it is a name on the hub
    return model.model_copy(update={"name": str(Path(model.name).resolve())}) if here else model


def _differences(old: Any, new: Any, key: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    old, new = _by_key(old), _by_key(new)
    name = key[-1] if key else ""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for inner in dict.fromkeys([*old, *new]):
            yield from _differences(old.get(inner), new.get(inner), (*key, inner))
    elif name in _OF_A_START or (name == "ckpt" and None in (old, new)):  # to resume turns checkpoints on
        return
    elif old != new:
        yield key, old, new


def _by_key(value: Any) -> Any:
    """A list as a mapping, so that one changed entry is not shown as a change of all."""
    return {str(index): item for index, item in enumerate(value)} if isinstance(value, list) else value
