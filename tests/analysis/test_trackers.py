"""TensorBoard and Trackio, with the real libraries."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from buckeye.config.load import load_with_warnings
from buckeye.config.rl import RLConfig
from buckeye.config.shared import TensorboardConfig, TrackioConfig
from buckeye.errors import UsageError
from buckeye.monitor.metrics import MetricsLog
from buckeye.monitor.tracker_threads import check_trackers, log_to_trackers

FOUND = importlib.util.find_spec


def write(directory, *steps):
    metrics = MetricsLog(directory / "metrics.jsonl")
    for step in steps:
        metrics.write("orchestrator", step, {"reward/mean": step / 4, "odd": "text", "none": None})
        metrics.write("trainer", step, {"loss": 1 / (step + 1)})


def test_a_run_asks_for_them(tmp_path):
    words = f"--trainer --orchestrator --output-dir {tmp_path} --tensorboard --trackio.project p".split()
    config, _ = load_with_warnings(RLConfig, words)
    assert config.trackers(None) == [TrackioConfig(project="p"), TensorboardConfig()]
    assert RLConfig().trackers(None) == []


def test_one_that_is_not_installed_is_refused(monkeypatch, refusal):
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "tensorboard" else FOUND(name)
    )
    with refusal(UsageError):
        check_trackers([TensorboardConfig()])


def test_tensorboard_reads_the_numbers_of_all_attempts(tmp_path):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for steps in ((0, 1), (2,)):
        settings = TensorboardConfig(log_dir=tmp_path / "both" if steps == (2,) else None)
        with log_to_trackers([settings], output_dir=tmp_path, run_id="abc", config=settings):
            write(tmp_path, *steps)
    found = {}
    for path in tmp_path.glob("*/events.out.tfevents.*"):
        read = accumulators.EventAccumulator(str(path)).Reload()
        for name in read.Tags()["tensors"]:
            assert name in ("trainer/loss", "orchestrator/reward/mean")
            for event in read.Tensors(name):
                found[name, event.step] = event.tensor_proto.float_val[0]
    assert [found["trainer/loss", step] for step in range(3)] == pytest.approx([1, 1 / 2, 1 / 3])
    assert [found["orchestrator/reward/mean", step] for step in range(3)] == [0.0, 0.25, 0.5]


@pytest.mark.slow  # imports Trackio in a separate process: it reads its directory at import
def test_trackio_keeps_the_numbers(tmp_path):
    pytest.importorskip("trackio")
    code = f"""
import json, sys
from pathlib import Path
from buckeye.config.shared import TrackioConfig
from buckeye.monitor.metrics import MetricsLog
from buckeye.monitor.tracker_threads import log_to_trackers
out, settings = Path({str(tmp_path)!r}), TrackioConfig(project="p", name="n")
for step in range(3):
    MetricsLog(out / "metrics.jsonl").write("trainer", step, {{"loss": step / 2}})
with log_to_trackers([settings], output_dir=out, run_id="abc", config=settings):
    pass
from trackio.sqlite_storage import SQLiteStorage
(run,) = SQLiteStorage.get_runs("p")
rows = SQLiteStorage.get_logs("p", run)
print("ROWS", json.dumps([[row["step"], row["trainer/loss"]] for row in rows]))
"""
    env = {**os.environ, "TRACKIO_DIR": str(tmp_path / "db"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
    (rows,) = [line for line in done.stdout.splitlines() if line.startswith("ROWS")]
    assert json.loads(rows.removeprefix("ROWS")) == [[0, 0.0], [1, 0.5], [2, 1.0]]
    assert (tmp_path / "trackio" / "position.json").exists()
