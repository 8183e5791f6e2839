"""Run directories made by hand, with the files that a launcher and its processes would leave."""

import json
import socket
from functools import partial

import psutil

from buckeye.base.process import RunIdentity
from buckeye.config.load import load_config, to_json
from buckeye.config.rl import RLConfig
from buckeye.launch.changed_settings import to_recorded_form
from buckeye.run_files.known_runs import register_run
from buckeye.run_files.record import ProcessRecord, RunRecord, birth_time, write_record
from buckeye.transport.checkpoint import save_checkpoint

STARTED = 1_700_000_000.0


def made_run(directory, *, run_id="aaaa1111", checkpoints=(), **changes):
    """Make a run with a record, an identity and a configuration that `rl list` finds."""
    directory.mkdir(parents=True)
    values = {
        "run_id": run_id,
        "attempt": 1,
        "state": "stopped",
        "host": socket.gethostname(),
        "launcher": None,
        "arguments": ("@", "run.toml", "--output-dir", "out", "--clean"),
        "working_directory": str(directory.parent),
        "max_steps": 20,
        "max_async_level": 1,
        "start_step": 0,
        "stop_seconds": 600.0,
        "started": STARTED,
        **changes,
    }
    record = RunRecord(**values)
    write_record(directory, record)
    attempts = [
        {"attempt": n, "started": STARTED, "resumed_step": None} for n in range(1, record.attempt + 1)
    ]
    identity = {"run_id": run_id, "attempt": record.attempt, "attempts": attempts}
    (directory / "run.json").write_text(json.dumps(identity))
    (directory / "configs").mkdir()
    (directory.parent / "run.toml").write_text("[trainer]\n[orchestrator]\n")
    config = load_config(RLConfig, ["--trainer", "--orchestrator", *_flags(record.arguments)])
    (directory / "configs" / "rl.json").write_text(to_json(to_recorded_form(config)))
    for step in checkpoints:
        save_checkpoint(
            directory / "checkpoints",
            step,
            partial(_write_model, step),
            orchestrator_state={"step": step},
            identity=RunIdentity(run_id=run_id, attempt=record.attempt),
        )
    register_run(directory, run_id)
    return directory


def _write_model(step, folder):
    (folder / "model.safetensors").write_bytes(b"m" * step)
    return {}


def _flags(words):
    return [word for word in words if word not in ("@", "run.toml")]


def recorded(process, title="rl", **changes):
    """Return the record of a process that a test started."""
    started = psutil.Process(process.pid).create_time()
    known = {"title": title, "pid": process.pid, "started": started, "birth": birth_time(process.pid)}
    return ProcessRecord(**{**known, **changes})


def write_metrics(directory, *records):
    """Write records given as (process, step, seconds after the start, values)."""
    with (directory / "metrics.jsonl").open("a") as file:
        for process, step, seconds, values in records:
            record = {"time": STARTED + seconds, "process": process, "step": step, **values}
            file.write(json.dumps(record) + "\n")
