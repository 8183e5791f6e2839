"""How long a run will take: from an earlier one on this machine, else from the model's size."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buckeye.base.storage import read_json
from buckeye.config.rl import RLConfig
from buckeye.monitor.metrics import read_run
from buckeye.run_files.known_runs import known_runs
from buckeye.run_files.record import read_events
from buckeye.setup.recipe.model import ModelFacts
from buckeye.setup.recipe.where import GpuLayout

_CPU_FLOPS = 3e10  # of a core, half of what benchmarks/vs_trl.py reaches with short rollouts of one turn
_GPU_FLOPS = 1.2e14  # of a GPU that trains
_GPU_TOKENS = 1.5e12  # sampled tokens a second and GPU, times parameters
_WORK_SAMPLED = 4  # multiplications a parameter and token where nothing is gained by batching
_WORK_TRAINED = 8  # forward, backward, and the log-probs
_STEP_SECONDS = 1.0  # of a step that has nothing to compute
_START_SECONDS = {"cpu": 40.0, "gpu": 120.0}  # until the first rollout: imports, model, engine
_WRONG_BY = 3.0  # a calculated time, either way
_START_WRONG_BY = 2.0
_EVALUATIONS = 2  # before the first step and after the last
_FEWEST_STEPS = 3
_MARKS = ("start", "weights", "finish")  # events of a run
_LIKELY_LENGTH = 0.5  # of the room that a rollout has


@dataclass(frozen=True, slots=True)
class TimeEstimate:
    """Seconds of the whole run: what is likely, and bounds of it. `source` names what it comes from."""

    seconds: float
    least: float
    most: float
    source: str


def estimate_time(
    config: RLConfig, model: ModelFacts, *, cores: int, layout: GpuLayout | None
) -> TimeEstimate | None:
    """The time of a run with its start and its evaluations; None for one without end.

    An earlier run with the same model and batch on this machine counts; else it is a rough calculation, which
    may be wrong by a factor of three. What the environment takes is not known to it.
    """
    steps = config.max_steps
    if steps is None:
        return None
    if layout is None and (measured := _measured(config)) is not None:
        around, step, run = measured
        seconds = around + step * steps
        return TimeEstimate(seconds, seconds, seconds, f"as in {run}")
    start = _START_SECONDS["cpu" if layout is None else "gpu"]
    work = _STEP_SECONDS * steps
    tokens = config.orchestrator.seq_len * _LIKELY_LENGTH
    for rollouts, trained in ((steps * config.orchestrator.batch_size, True), (_evaluated(config), False)):
        work += _seconds(rollouts * tokens, model.parameters, cores=cores, layout=layout, trained=trained)
    least = start / _START_WRONG_BY + work / _WRONG_BY
    most = start * _START_WRONG_BY + work * _WRONG_BY
    return TimeEstimate(start + work, least, most, "roughly estimated")


def _seconds(tokens: float, size: int, *, cores: int, layout: GpuLayout | None, trained: bool) -> float:
    """What it takes to sample these tokens, and to train on them if they are `trained`."""
    work = (_WORK_TRAINED if trained else 0) * size * tokens
    if layout is None:
        return (_WORK_SAMPLED * size * tokens + work) / (_CPU_FLOPS * cores)
    sampling = tokens * size / (_GPU_TOKENS * len(layout.inference))
    training = work / (_GPU_FLOPS * len(layout.trainer))
    return sampling + training if layout.shared else max(sampling, training)


def _evaluated(config: RLConfig) -> int:
    """Rollouts of all evaluations; those of an evaluation of everything are not known here."""
    evaluation = config.orchestrator.eval
    if evaluation is None:
        return 0
    return _EVALUATIONS * max(evaluation.num_examples, 0) * evaluation.rollouts_per_example


def _measured(config: RLConfig) -> tuple[float, float, Path] | None:
    """Of the newest run that is alike: seconds before and after its steps, seconds a step, its directory."""
    wanted = _kind(config.model_dump(mode="json"))
    for run in known_runs()[0]:
        try:
            if _kind(read_json(run.directory / "configs" / "rl.json")) != wanted:
                continue
            step = _seconds_a_step(run.directory / "metrics.jsonl")
            around = _seconds_around(run.directory)
        except (OSError, ValueError, KeyError, TypeError):
            continue  # a run that is being written or was tampered with tells nothing
        if step is not None and around is not None:
            return max(around - step, 0.0), step, run.directory
    return None


def _seconds_around(run: Path) -> float | None:
    """From the start of a run to the end of its first step, and from that of its last to its own. None for
    one that did not go through at once."""
    events = list(read_events(run))
    times = {kind: [event["time"] for event in events if event["event"] == kind] for kind in _MARKS}
    if not times["weights"] or any(len(times[kind]) != 1 for kind in ("start", "finish")):
        return None
    return float(times["weights"][0] - times["start"][0] + times["finish"][0] - times["weights"][-1])


def _kind(config: dict[str, Any]) -> tuple[Any, ...]:
    """What the time of a step depends on."""
    orchestrator = config["orchestrator"]
    return (
        config["trainer"]["model"]["name"],
        orchestrator["batch_size"],
        orchestrator["seq_len"],
        (orchestrator["eval"] or {}).get("num_examples"),
        [env["args"].get("config_path") for env in orchestrator["env"]],
    )


def _seconds_a_step(metrics: Path) -> float | None:
    times = read_run(metrics).values("trainer/time")
    gaps = [later - earlier for earlier, later in itertools.pairwise(times.values())]
    return statistics.median(gaps) if len(gaps) >= _FEWEST_STEPS else None
