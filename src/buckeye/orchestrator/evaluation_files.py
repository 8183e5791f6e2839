"""What an evaluation leaves on the disk: `<env>.json` with its settings and figures, `<env>.jsonl` with its
rollouts."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from buckeye.config.environments import EnvConfig, EvalEnvConfig
from buckeye.config.orchestrator import EvalConfig
from buckeye.inference.client import SamplingParams
from buckeye.monitor.intervals import cluster_of, mean_over_tasks
from buckeye.orchestrator.environments import NamedEnvironment
from buckeye.orchestrator.evaluate import EvalResult, count_passed, evaluate
from buckeye.orchestrator.player import TaskPlayer
from buckeye.space import write_when_room, write_when_room_async
from buckeye.storage import utf8, write_file

log = logging.getLogger(__name__)


async def evaluate_and_write(
    directory: Path,
    environments: Sequence[tuple[EvalEnvConfig, NamedEnvironment]],
    settings: EvalConfig,
    player: TaskPlayer,
    *,
    measured: Mapping[str, Any],
) -> dict[str, float]:
    """Evaluate on all environments as `settings` says, write their files, and return their metrics.

    `measured` goes into the files; it says what is evaluated and how it samples.
    """
    metrics: dict[str, float] = {}
    for env_config, env in environments:
        examples, each = env_config.num_examples, env_config.rollouts_per_example
        result = await evaluate(
            env,
            player,
            split=env_config.split,
            num_examples=settings.num_examples if examples is None else examples,
            rollouts_per_example=settings.rollouts_per_example if each is None else each,
        )
        log.log(result.level, result.summary())
        if (step := measured.get("step")) is not None and {*result.versions} - {step}:
            names = ", ".join(map(str, result.versions))
            log.warning("The evaluation of step %d on %s was played by versions %s", step, env.name, names)
        record = {**measured, **environment_record(env_config, result.split)}
        for path, text in (await asyncio.to_thread(_files, directory, result, record)).items():
            what = f"the evaluation {path.name}"
            write = partial(write_file, path, text)
            await write_when_room_async(path, write, what=what, needed=len(text))
        metrics |= result.metrics()
    return metrics


def environment_record(env: EnvConfig, split: str) -> dict[str, Any]:
    """What was evaluated on."""
    return {"id": env.id, "args": dict(env.args), "split": split}


def sampling_record(params: SamplingParams, seq_len: int) -> dict[str, Any]:
    """How the policy sampled."""
    names = ("temperature", "top_p", "top_k", "min_tokens", "max_tokens")
    return {"sampling": {name: getattr(params, name) for name in names}, "seq_len": seq_len}


def write_evaluation(directory: Path, result: EvalResult, measured: Mapping[str, Any]) -> None:
    """Write both files of one environment. Where the disk is full it waits."""
    for path, text in _files(directory, result, measured).items():
        what = f"the evaluation {path.name}"
        write_when_room(path, partial(write_file, path, text), what=what, needed=len(text))


def _files(directory: Path, result: EvalResult, measured: Mapping[str, Any]) -> dict[Path, bytes]:
    """The content of both files, the rollouts last: they say that the evaluation is complete.

    What a task's data or a message holds that JSON cannot is written as text.
    """
    figures = {**measured, **_figures(result)}
    lines = [
        json.dumps(
            {
                "task_id": rollout.task.id,
                "rollout": index % result.rollouts_per_example,
                "data": dict(rollout.task.data),
                "reward": rollout.reward,
                "components": dict(rollout.outcome.components),
                "stop_reason": rollout.outcome.stop_reason,
                "truncated": rollout.truncated,
                "error": rollout.outcome.error,
                "trace": list(rollout.outcome.trace),
                "turns": rollout.turns,
                "completion_tokens": rollout.completion_tokens,
                "oldest_version": rollout.oldest_version,
                "messages": list(rollout.messages),
            },
            ensure_ascii=False,
            default=str,
        )
        for index, rollout in enumerate(result.played)
    ]
    return {
        directory / f"{result.env_name}.json": utf8(json.dumps(figures, indent=1, ensure_ascii=False)),
        directory / f"{result.env_name}.jsonl": utf8("".join(f"{line}\n" for line in lines)),
    }


def _figures(result: EvalResult) -> dict[str, Any]:
    """The interval is one over clusters of tasks that share a lemma; see `buckeye.monitor.intervals`."""
    figures: dict[str, Any] = {
        "env": result.env_name,
        "mean_reward": None,
        "exact": None,
        "ci95": None,
        "n": len(result.rewards),
        "errored": result.errored,
        "rollouts_per_example": result.rollouts_per_example,
        "seconds": result.seconds,
        "versions": result.versions,
        **result.metrics(),
    }
    if result.rewards:
        tasks = list(result.by_task.values())
        clusters = [cluster_of(rollouts[0].task.id, rollouts[0].task.data) for rollouts in tasks]
        exact = mean_over_tasks([count_passed(rollouts) / len(rollouts) for rollouts in tasks], clusters)
        figures |= {
            "mean_reward": result.mean_reward,
            "exact": exact.value,
            "ci95": (exact.low, exact.high),
        }
    return figures
