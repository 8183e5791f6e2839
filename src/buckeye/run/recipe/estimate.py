"""How long a run will take: from an earlier one on this machine, else from the model's size."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buckeye.config.rl import RLConfig
from buckeye.monitor.metrics import read_metrics
from buckeye.run.gpu_layout import GpuLayout
from buckeye.run.recipe.model import ModelFacts
from buckeye.run.registry import known_runs
from buckeye.storage import read_json

_CPU_FLOPS = 3e10  # of a core, half of what benchmarks/vs_trl.py reaches with short rollouts of one turn
_GPU_FLOPS = 1.2e14  # of a GPU that trains
_GPU_TOKENS = 1.5e12  # sampled tokens a second and GPU, times parameters
_WORK_SAMPLED = 4  # multiplications a parameter and token where nothing is gained by batching
_WORK_TRAINED = 8  # forward, backward, and the log-probs
_STEP_SECONDS = 1.0  # of a step that has nothing to compute
_FEWEST_STEPS = 3
_LIKELY_LENGTH = 0.5  # of the room that a rollout has


@dataclass(frozen=True, slots=True)
class TimeEstimate:
    """`seconds` of the whole run. `source` names what it comes from."""

    seconds: float
    source: str


def estimate_time(
    config: RLConfig, model: ModelFacts, *, cores: int, layout: GpuLayout | None
) -> TimeEstimate:
    """The time of a run, without loading the model and without its evaluations.

    An earlier run with the same model and batch on this machine counts; else it is a rough calculation, which
    may be wrong by a factor of three. What the environment takes is not known to it.
    """
    steps = config.max_steps or 0
    if layout is None:
        measured = _measured(config)
        if measured is not None:
            seconds, run = measured
            return TimeEstimate(seconds * steps, f"measured in {run}")
    tokens = config.orchestrator.batch_size * config.orchestrator.seq_len * _LIKELY_LENGTH
    if layout is None:
        work = (_WORK_SAMPLED + _WORK_TRAINED) * model.parameters * tokens
        step = work / (_CPU_FLOPS * cores)
    else:
        sampling = tokens * model.parameters / (_GPU_TOKENS * len(layout.inference))
        training = _WORK_TRAINED * model.parameters * tokens / (_GPU_FLOPS * len(layout.trainer))
        step = sampling + training if layout.shared else max(sampling, training)
    return TimeEstimate((step + _STEP_SECONDS) * steps, "roughly estimated")


def _measured(config: RLConfig) -> tuple[float, Path] | None:
    """Seconds a step of the newest run that is alike, and its directory."""
    wanted = _kind(config.model_dump(mode="json"))
    for run in known_runs()[0]:
        try:
            if _kind(read_json(run.directory / "configs" / "rl.json")) != wanted:
                continue
            seconds = _seconds_a_step(run.directory / "metrics.jsonl")
        except (OSError, ValueError, KeyError, TypeError):
            continue  # a run that is being written or was tampered with tells nothing
        if seconds is not None:
            return seconds, run.directory
    return None


def _kind(config: dict[str, Any]) -> tuple[Any, ...]:
    """What the time of a step depends on."""
    orchestrator = config["orchestrator"]
    return (
        config["trainer"]["model"]["name"],
        orchestrator["batch_size"],
        orchestrator["seq_len"],
        [env["args"].get("config_path") for env in orchestrator["env"]],
    )


def _seconds_a_step(metrics: Path) -> float | None:
    times = {}
    for record in read_metrics(metrics):
        if record.get("process") == "trainer":
            times[int(record["step"])] = float(record["time"])
    ordered = [times[step] for step in sorted(times)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(ordered)]
    return statistics.median(gaps) if len(gaps) >= _FEWEST_STEPS else None
