"""Fault points: named places in the code where tests make a process fail. Inactive in real runs.

`BUCKEYE_FAULTS="checkpoint.before_commit=kill@2,trainer.oom=oom"` names points and kinds of failure. `@2`
means the second time that a process reaches the point (default: the first time). Each entry happens once per
directory `BUCKEYE_FAULTS_DONE`, regardless of processes and restarts: the first one to fail leaves a mark.
"""

from __future__ import annotations

import errno
import functools
import os
import re
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from buckeye.errors import UsageError

FAULTS = "BUCKEYE_FAULTS"
FAULTS_DONE = "BUCKEYE_FAULTS_DONE"

POINTS = {
    "storage.temporary_written": "a file or directory is written under its temporary name, not yet flushed",
    "storage.before_rename": "the file or directory is flushed to the disk, not yet renamed",
    "storage.after_rename": "the file or directory has its name, and its folder is not yet flushed",
    "checkpoint.captured": "the trainer has copied its state, and has not written it",
    "checkpoint.files": "some files of a checkpoint are written, not all",
    "checkpoint.before_commit": "all files of a checkpoint are written, except COMMITTED",
    "checkpoint.committed": "a checkpoint is complete; older ones are not yet deleted",
    "store.upload": "a file of a checkpoint is in the object store, maybe not all",
    "store.before_commit": "all files of a checkpoint are in the object store, except COMMITTED",
    "store.committed": "a checkpoint is in the object store; older ones are not yet deleted from it",
    "store.deleted": "an object of an old checkpoint is deleted, maybe not all",
    "store.download": "a file of a checkpoint is downloaded, maybe not all",
    "weights.publish": "a step is done; its weights are not yet written",
    "weights.published": "the weights of a step are written, not yet announced",
    "batch.write": "a batch is complete in memory",
    "batch.written": "a batch is written; its effects are not yet recorded",
    "rollouts.write": "the text of a step's rollouts is about to be written",
    "trainer.step": "the gradients of a step are computed; the optimizer has not used them",
    "trainer.oom": "the trainer is about to compute the gradients of a micro-batch",
}
"""Names of all fault points, with the state at each one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Failure at visit number `visit` (from 1) of one process to `point`. `mark` is its unique name."""

    point: str
    kind: str
    visit: int
    mark: str


_CODE = "BK-CONFIG-VALUE"
_ENTRY = re.compile(r"^([a-z_.]+)=([a-z]+)(?:@([1-9]\d*))?$")
_visits: Counter[str] = Counter()


def fault_point(name: str) -> None:
    """Fail here if `BUCKEYE_FAULTS` requests it.

    Raises `OSError` (no space), `RuntimeError`, `UsageError` for an unknown name, or torch's
    `OutOfMemoryError`.
    """
    text = os.environ.get(FAULTS)
    if not text:
        return
    if name not in POINTS:
        raise UsageError(
            f"unknown fault point {name}", code=_CODE, hint="add it to POINTS in buckeye/base/faults.py"
        )
    _visits[name] += 1
    for fault in read_faults(text):
        if (fault.point, fault.visit) == (name, _visits[name]) and _is_first_to_mark(fault):
            _KINDS[fault.kind]()


@functools.cache
def read_faults(text: str) -> tuple[Fault, ...]:
    """Parse a value of `BUCKEYE_FAULTS`. Raise `UsageError` for an invalid entry."""
    return tuple(_parse_fault(entry.strip(), number) for number, entry in enumerate(text.split(","), start=1))


def _parse_fault(entry: str, number: int) -> Fault:
    match = _ENTRY.match(entry)
    if match is None:
        hint = "write POINT=KIND@VISIT, as storage.before_rename=kill@2"
        raise UsageError(f"invalid entry {entry!r}", code=_CODE, at=FAULTS, hint=hint)
    point, kind, visit = match.groups()
    for name, value, known in (("point", point, POINTS), ("kind", kind, _KINDS)):
        if value not in known:
            hint = f"use one of {', '.join(known)}"
            raise UsageError(f"unknown {name} {value!r}", code=_CODE, at=FAULTS, hint=hint)
    return Fault(point=point, kind=kind, visit=int(visit or 1), mark=f"{number}-{entry}")


def _is_first_to_mark(fault: Fault) -> bool:
    try:
        handle = os.open(_marks_folder() / fault.mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return False
    os.close(handle)
    return True


def _marks_folder() -> Path:
    directory = os.environ.get(FAULTS_DONE)
    if not directory or not Path(directory).is_dir():
        raise UsageError(
            f"{FAULTS} requires {FAULTS_DONE}, a directory for the marks of past faults",
            code=_CODE,
            hint=f"set {FAULTS_DONE} to an existing directory",
        )
    return Path(directory)


def _signal(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def _no_space() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _out_of_memory() -> None:
    import torch

    raise torch.OutOfMemoryError("out of memory, injected by BUCKEYE_FAULTS")


def _error() -> None:
    raise RuntimeError("error injected by BUCKEYE_FAULTS")


_KINDS: dict[str, Callable[[], None]] = {
    "kill": lambda: _signal(signal.SIGKILL),
    "stop": lambda: _signal(signal.SIGSTOP),
    "nospace": _no_space,
    "oom": _out_of_memory,
    "error": _error,
    "exit": lambda: os._exit(1),
}


if FAULTS in os.environ:  # report mistakes at the start, not at the point
    read_faults(os.environ[FAULTS])
    _marks_folder()
