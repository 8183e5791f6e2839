"""Upload the checkpoints of a run to an object store in the background."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from buckeye.base.disk import human_bytes, size_of
from buckeye.base.process import stop_requests
from buckeye.base.storage import lock_file, write_file
from buckeye.config.shared import CheckpointConfig
from buckeye.errors import BuckeyeError, CheckpointError, StoreError
from buckeye.monitor.metrics import MetricsLog
from buckeye.transport.checkpoint import (
    UPLOADS_FILE,
    CheckpointInfo,
    checkpoints_oldest_first,
    find_best_checkpoint,
    is_complete,
    read_commit,
    read_orchestrator_state,
    read_scores,
)
from buckeye.transport.object_store import CheckpointStore, name_in_store

log = logging.getLogger(__name__)

_CHECK_SECONDS = 1.0
_POLL_SECONDS = 0.1
_LOG_SECONDS = 10.0
_RETRY_DELAYS = (5.0, 300.0)  # delay after the first failure, and maximum delay
_FINAL_RETRY_DELAY = 5.0  # delay after the end of the run
_MAX_FINAL_TRIES = 3  # tries after the end of the run, if the store denies access


class State(msgspec.Struct, kw_only=True, frozen=True):
    """State of the uploads of a run.

    `committed` is the step of the newest checkpoint in the store. `waiting` lists the steps of checkpoints
    that are not uploaded yet. `uploading` is the step of the current upload. `failures` counts consecutive
    failed uploads, and `error` is the last error.
    """

    url: str
    committed: int | None = None
    waiting: list[int] = []
    uploading: int | None = None
    failures: int = 0
    error: str | None = None


class CheckpointUploader:
    """Uploads the complete checkpoints of a run in a thread, one at a time, newest first.

    The uploader keeps the newest `keep` checkpoints and the best one in the store, and deletes the others.
    Training does not wait for uploads. The uploader logs and retries a failed upload until the run ends. On
    exit, the context waits for pending uploads until `exit_timeout` seconds have passed or Ctrl-C is pressed.
    """

    def __init__(
        self, output_dir: Path, store: CheckpointStore, *, keep: int | None, exit_timeout: float
    ) -> None:
        self._run, self._root = output_dir, output_dir / "checkpoints"
        self._store, self._keep, self._exit_timeout = store, keep, exit_timeout
        self._thread = threading.Thread(target=self._work, name="uploads", daemon=True)
        self._stored: set[tuple[int, int]] | None = None
        self._kept_in_store: list[int] = []
        self._state = State(url=store.url)
        self._denials = 0
        self._ending = threading.Event()

    def __enter__(self) -> CheckpointUploader:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        earlier_requests, logged = stop_requests(), time.monotonic()
        deadline = logged + self._exit_timeout
        while self._thread.is_alive() and time.monotonic() < deadline and stop_requests() == earlier_requests:
            self._thread.join(_POLL_SECONDS)
            if self._denials >= _MAX_FINAL_TRIES:
                break
            if time.monotonic() > logged + _LOG_SECONDS:
                logged = time.monotonic()
                log.info("Waiting at most %.0f s for uploads: %s", deadline - logged, describe(self._state))
        if self.pending_steps:
            log.warning(
                "Checkpoints not uploaded to %s: steps %s. They remain in %s; resume the run to upload them",
                self._state.url,
                ", ".join(map(str, self.pending_steps)),
                self._root,
            )

    @property
    def pending_steps(self) -> list[int]:
        """Steps of the checkpoints that are not uploaded yet."""
        return self._state.waiting

    def _work(self) -> None:
        while True:
            ending = self._ending.is_set()
            try:
                has_more = self.upload_next()
                if self._state.failures and not has_more:
                    log.info("Connected to %s again", self._state.url)
                    self._set_state(failures=0, error=None)
            except Exception as error:  # an error must not end the thread
                self._handle_failure(error)
                continue
            if not has_more:
                if ending:
                    return
                self._ending.wait(_CHECK_SECONDS)

    def upload_next(self) -> bool:
        """Upload the newest checkpoint that is missing in the store, and delete old ones from the store.

        Returns True if more checkpoints may be missing.
        """
        local = checkpoints_oldest_first(self._root)
        known = self._stored or set()
        if self._stored is not None and _keys(local) <= known:
            return False
        missing = [info.step for info in self._pending(local, []) if (info.attempt, info.step) not in known]
        self._set_state(waiting=missing)  # also if the store cannot be reached
        stored = self._store.list_checkpoints()
        if self._stored is None and stored:
            with suppress(CheckpointError):  # a resume from that checkpoint reports the damage
                self._kept_in_store = self._store.manifest(stored[-1]).kept
        self._stored = _keys(stored)
        pending = self._pending(local, stored)
        self._set_state(
            committed=stored[-1].step if stored else None, waiting=[info.step for info in pending]
        )
        if not pending:
            self._stored |= _keys(local)  # skip checkpoints that are too old to be uploaded
            self._prune(stored)
            return False
        if len(pending) > 1:
            log.warning(
                "Uploads are behind: steps %s are not in %s yet",
                ", ".join(str(info.step) for info in pending),
                self._store.url,
            )
        self._upload(pending[-1], local)
        self._prune(self._store.list_checkpoints())
        return True

    def _pending(
        self, local: Sequence[CheckpointInfo], stored: Sequence[CheckpointInfo]
    ) -> list[CheckpointInfo]:
        """Return the checkpoints of the run directory that are missing in the store, newest last."""
        present = _keys(stored)
        by_age = sorted(present | _keys(local))
        newest = set(by_age[-self._keep :] if self._keep is not None else by_age)
        kept = self._protected_steps([*stored, *local]) or ()
        return [
            info
            for info in local
            if (info.attempt, info.step) not in present
            and ((info.attempt, info.step) in newest or info.step in kept)
            and is_complete(info)
        ]

    def _upload(self, info: CheckpointInfo, local: Sequence[CheckpointInfo]) -> None:
        step, started, size = info.step, time.monotonic(), size_of(info.path)
        log.info("Uploading the checkpoint of step %d: %s", step, human_bytes(size))
        self._set_state(uploading=step)
        try:
            with _locked(info.path):
                commit = read_commit(info.path)
                sent = self._store.upload(
                    info.path,
                    commit,
                    name_in_store(info, commit),
                    self._run,
                    kept=self._protected_steps(local) or (),
                )
        except (FileNotFoundError, CheckpointError):
            if info in checkpoints_oldest_first(self._root):
                raise
            log.info("Checkpoint of step %d was deleted before its upload", step)
            return
        finally:
            self._set_state(uploading=None)
        seconds, failures = time.monotonic() - started, self._state.failures
        log.info("Uploaded the checkpoint of step %d: %s in %.1f s", step, human_bytes(sent), seconds)
        metrics = MetricsLog(self._run / "metrics.jsonl")
        metrics.write("upload", step, {"seconds": seconds, "bytes": sent, "failures": failures})
        metrics.close()
        waiting = [other for other in self._state.waiting if other != step]
        self._set_state(waiting=waiting, failures=0, error=None)

    def _prune(self, stored: Sequence[CheckpointInfo]) -> None:
        self._stored = (self._stored or set()) | _keys(stored)
        self._set_state(committed=stored[-1].step if stored else None)
        kept = self._protected_steps(stored)
        self._store.prune(self._keep if kept is not None else None, protected=kept or ())

    def _protected_steps(self, infos: Sequence[CheckpointInfo]) -> Collection[int] | None:
        """Return the steps of the best checkpoints, which the store keeps at any age, or None if unknown."""
        try:
            scores = read_scores(self._run)
            best = find_best_checkpoint(infos, scores)
            local = checkpoints_oldest_first(self._root)
            by_loss = read_orchestrator_state(local[-1]).get("best") if local else None
        except BuckeyeError as error:
            log.warning("Keeping all checkpoints in %s: the best one is unknown: %s", self._state.url, error)
            return None
        kept = {best.info.step} if best is not None else set()
        return kept | ({by_loss["step"]} if by_loss else set()) | set(() if scores else self._kept_in_store)

    def _handle_failure(self, error: Exception) -> None:
        failures = self._state.failures + 1
        is_denied = isinstance(error, StoreError) and error.denied
        self._denials = self._denials + 1 if is_denied and self._ending.is_set() else 0
        first, maximum = _RETRY_DELAYS
        delay = min(maximum, first * 2 ** (failures - 1))
        text = str(error) if isinstance(error, BuckeyeError) else f"{type(error).__name__}: {error}"
        self._set_state(failures=failures, error=text)
        log.warning(
            "Upload failed (consecutive failures: %d, next try in %.0f s); the run continues, and its "
            "checkpoints remain in %s: %s",
            failures,
            _FINAL_RETRY_DELAY if self._ending.is_set() else delay,
            self._root,
            text,
        )
        if self._ending.wait(delay):
            time.sleep(_FINAL_RETRY_DELAY)

    def _set_state(self, **changes: Any) -> None:
        """Update the state and write it to the run directory."""
        self._state = msgspec.structs.replace(self._state, **changes)
        if self._root.is_dir():  # a run without checkpoints has no state of uploads
            content = {**msgspec.to_builtins(self._state), "text": describe(self._state)}
            with suppress(OSError):  # the writers of metrics and checkpoints report a full disk
                write_file(self._run / UPLOADS_FILE, json.dumps(content))


def _keys(infos: Sequence[CheckpointInfo]) -> set[tuple[int, int]]:
    return {(info.attempt, info.step) for info in infos}


def describe(state: State) -> str:
    """Return the state of the uploads in one line."""
    parts = [
        f"newest checkpoint: step {state.committed}" if state.committed is not None else "no checkpoint yet"
    ]
    if state.uploading is not None:
        parts.append(f"uploading step {state.uploading}")
    waiting = [str(step) for step in state.waiting if step != state.uploading]
    if waiting:
        parts.append(f"waiting: steps {', '.join(waiting)}")
    if state.failures:
        parts.append(f"{state.failures} consecutive failures: {state.error}")
    return f"{state.url}: {'; '.join(parts)}"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock a checkpoint, so that it is not deleted during its upload."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # the file system may have no locks
            lock_file(handle)
        yield
    finally:
        os.close(handle)


def open_uploads(
    output_dir: Path, ckpt: CheckpointConfig | None
) -> AbstractContextManager[CheckpointUploader | None]:
    """Return a context manager with the uploader of a run, or with None if `ckpt.store` is not set."""
    if ckpt is None or ckpt.store is None:
        return nullcontext()
    return CheckpointUploader(
        output_dir, CheckpointStore(ckpt.store), keep=ckpt.keep, exit_timeout=ckpt.store_timeout
    )
