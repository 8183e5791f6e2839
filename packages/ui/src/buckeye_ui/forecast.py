"""What a run should take by the plan that is made before it, and what it has taken."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from buckeye.base.disk import size_of
from buckeye.base.storage import step_directories
from buckeye.config.load import load_config
from buckeye.config.rl import RLConfig
from buckeye.errors import BuckeyeError
from buckeye.run_files.known_runs import record_now
from buckeye.sizing.devices import gpus
from buckeye.sizing.disk import estimate_disk
from buckeye.sizing.doctor import hardware_of
from buckeye.sizing.memory import plan_memory
from buckeye.sizing.model import find_model, read_shape
from buckeye_ui.sources import OpenRun

_GIB = 2**30


def forecast(run: OpenRun) -> dict[str, Any]:
    """`rows` have `what`, and in bytes what is `planned`, the most where it says `at_most`, and `measured` so
    far; or `missing` says why there are none. Memory is told of a run of this machine."""
    settings = run.path / "configs" / "rl.json"
    if not settings.is_file():
        return {"rows": [], "missing": "its settings are not recorded"}
    try:
        config = load_config(RLConfig, ["@", str(settings)], environ={})
        return {"rows": [*_memory(run, config), *_disk(run, config)], "missing": None}
    except BuckeyeError as error:  # settings of another version
        return {"rows": [], "missing": str(error)}


def _disk(run: OpenRun, config: RLConfig) -> Iterator[dict[str, Any]]:
    for need in estimate_disk(config, _model(run.path, config)).needs:
        if need.size:
            measured = sum(size_of(run.path / name) for name in need.paths)
            yield _row(f"disk: {need.kind}", need.size, measured, at_most=need.at_most)


def _memory(run: OpenRun, config: RLConfig) -> Iterator[dict[str, Any]]:
    peaks = [peak for step in run.steps if (peak := step.value("trainer/peak_memory_gib")) is not None]
    model = _model(run.path, config)
    shape = None if model is None else read_shape(model)
    if not peaks or shape is None or not _was_here(run.path):
        return
    for need in plan_memory(config, shape, hardware_of(config, gpus())):
        if need.process == "trainer 0":
            yield _row(f"memory: trainer, {need.place}", need.total, int(max(peaks) * _GIB), at_most=False)
            return


def _was_here(path: Path) -> bool:
    try:
        return record_now(path).host == socket.gethostname()
    except BuckeyeError:  # there is none
        return False


def _row(what: str, planned: int, measured: int, *, at_most: bool) -> dict[str, Any]:
    return {"what": what, "planned": planned, "measured": measured, "at_most": at_most}


def _model(path: Path, config: RLConfig) -> Path | None:
    """A directory with the model's sizes: weights of the run, or what it began with, by a name that may mean
    another one here."""
    weights = (one for one in step_directories(path / "weights").values() if (one / "config.json").is_file())
    return next(weights, None) or find_model(config.trainer.model.name)
