"""Writing a checkpoint and trusting it again.

`step_<N>/{trainer/..., orchestrator/state.json, COMMITTED}`: the state after N optimizer steps. `COMMITTED`
names every file with its SHA-256 and is written last; the directory then takes its name in one step.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from buckeye import storage
from buckeye.checkpoint.find import COMMITTED, CheckpointInfo, read_commit
from buckeye.errors import CheckpointError
from buckeye.faults import fault_point
from buckeye.process import RunIdentity

_ORCHESTRATOR_STATE = Path("orchestrator", "state.json")


def save_checkpoint(
    root: Path,
    step: int,
    fill_trainer: Callable[[Path], Mapping[str, str]],
    *,
    orchestrator_state: Mapping[str, Any],
    identity: RunIdentity,
) -> Path:
    """Commit the state after `step` optimizer steps; `fill_trainer(directory)` writes the trainer's part, and
    returns the SHA-256 of those of its files that need not be read again for it.

    A checkpoint of the same step (of an earlier attempt) is replaced.
    """

    def fill(directory: Path) -> None:
        (directory / "trainer").mkdir()
        known = {f"trainer/{name}": digest for name, digest in fill_trainer(directory / "trainer").items()}
        (directory / _ORCHESTRATOR_STATE).parent.mkdir()
        (directory / _ORCHESTRATOR_STATE).write_text(json.dumps(orchestrator_state), encoding="utf-8")
        commit = {
            "run_id": identity.run_id,
            "attempt": identity.attempt,
            "step": step,
            "time": time.time(),
            "files": _hashes(directory, known),
        }
        fault_point("checkpoint.before_commit")
        (directory / COMMITTED).write_text(json.dumps(commit, indent=1), encoding="utf-8")

    final = storage.step_directory(root, step)
    storage.write_directory(final, fill, replace=True)
    fault_point("checkpoint.committed")
    return final


def verify_checkpoint(info: CheckpointInfo, *, share: int = 0, shares: int = 1) -> None:
    """Raise `CheckpointError` unless every file is there with the content that was committed. Of several
    processes that verify it together, each reads one of the `shares`."""
    committed = sorted(read_commit(info.path)["files"].items())
    for name, digest in committed[share::shares]:
        path = info.path / name
        try:
            found = storage.sha256_file(path)
        except OSError as error:
            reason = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
            raise CheckpointError(
                f"{path} {reason}. Resume from another step, or delete {info.path}."
            ) from None
        if found != digest:
            raise CheckpointError(
                f"{path} is not the file that was committed (SHA-256 differs). "
                f"Resume from another step, or delete {info.path}."
            )


def trainer_state(info: CheckpointInfo) -> Path:
    """The directory that `fill_trainer` had filled."""
    return info.path / "trainer"


def read_orchestrator_state(info: CheckpointInfo) -> dict[str, Any]:
    """The orchestrator's state at that step."""
    path = info.path / _ORCHESTRATOR_STATE
    try:
        return storage.read_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}). Resume from another step.") from error


def _hashes(directory: Path, known: Mapping[str, str]) -> dict[str, str]:
    """Name -> SHA-256 of every file under a directory, but for those that are `known`."""
    names = sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
    unknown = [name for name in names if name not in known]
    computed = zip(unknown, storage.sha256_files([directory / name for name in unknown]), strict=True)
    found = {**known, **dict(computed)}
    return {name: found[name] for name in names}
