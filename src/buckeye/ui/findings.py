"""Findings of `rl diagnose`, which runs in a separate process: it may read hundreds of megabytes."""

from __future__ import annotations

import json
import subprocess
import tempfile
import threading
import time
from typing import Any

from buckeye.base.process import PYTHON, ChildProcess
from buckeye.ui.run_catalog import OpenRun

_SECONDS = 900.0
_REUSE_SECONDS = 30.0  # minimum seconds between two diagnoses of an active run
_STAMPS_READ = ("metrics", "events", "rollouts", "evals")
_running_limit = threading.Semaphore(2)
_running: list[ChildProcess] = []
_start_lock = threading.Lock()
_stopping = threading.Event()


def findings_of(run: OpenRun) -> dict[str, Any]:
    """Return the output of `rl diagnose --json`, and the last `step` that it covers.

    If the diagnosis failed, `missing` has the reason. Findings about an active run are reused for
    `_REUSE_SECONDS` seconds.
    """
    with run.diagnosis_lock:
        stamp = [run.stamp()[name] for name in _STAMPS_READ]
        seen, diagnosed_at, answer = run.cache.get("findings", (None, 0.0, {}))
        if answer and (seen == stamp or time.monotonic() - diagnosed_at < _REUSE_SECONDS):
            return dict(answer)
        steps = run.steps
        with _running_limit:
            diagnosed = _diagnose(run)
        found = {**diagnosed, "step": steps[-1].number if steps else None}
        run.cache["findings"] = (stamp, time.monotonic(), found)
        return found


def stop() -> None:
    """End all running diagnoses, and start none of those that wait."""
    with _start_lock:
        _stopping.set()
    for child in list(_running):
        child.end(1.0, session=True)


def _diagnose(run: OpenRun) -> dict[str, Any]:
    argv = [*PYTHON, "-m", "buckeye", "rl", "diagnose", str(run.path), "--json"]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        with _start_lock:
            if _stopping.is_set():
                return {"findings": [], "missing": "This server is stopping."}
            child = ChildProcess(argv, stdout=out.fileno(), stderr=err.fileno(), guarded=True)
            _running.append(child)
        try:
            ended = f"it ended with exit code {child.wait(_SECONDS)}"
        except subprocess.TimeoutExpired:
            ended = f"it did not end within {_SECONDS:g} s"
            child.end(1.0, session=True)
        finally:
            _running.remove(child)
        out.seek(0)
        err.seek(0)
        try:
            answer = json.load(out)
        except ValueError:
            error_lines = err.read().decode(errors="replace").strip().splitlines() or [ended]
            return {"findings": [], "missing": f"This run could not be diagnosed: {error_lines[-1]}"}
    return dict(answer)
