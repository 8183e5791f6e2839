"""`evals`: measure a model on environments, with an engine of its own unless a server is given."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from buckeye.config.evals import EvalsConfig
from buckeye.errors import RunError
from buckeye.inference.client import InferenceClient, SamplingParams
from buckeye.inference.render import ChatRenderer
from buckeye.monitor.log import SUCCESS, setup_logging
from buckeye.orchestrator.environments import load_environments
from buckeye.orchestrator.evaluate import EvalResult, evaluate, wilson_interval
from buckeye.orchestrator.rollout import RolloutPlayer
from buckeye.run.model_files import fetch_model
from buckeye.run.serve import served_model
from buckeye.storage import write_file

log = logging.getLogger(__name__)
Number = TypeVar("Number", int, float)


def run_evals(config: EvalsConfig) -> int:
    """Evaluate, print the era's line per environment, write `evals/<env>.json` and `.jsonl`; exit code 0.

    Raises RunError, after writing, if an environment has no scored rollout at all.
    """
    setup_logging(config.log.level, "evals", None)
    results = asyncio.run(evaluate_model(config))
    for result in results:
        log.log(SUCCESS if result.rewards else logging.ERROR, result.summary())
        write_result(config, result)
    for result in results:
        if not result.rewards:
            raise RunError(
                f"no rollout of {result.env_name} could be scored; the first failed with: "
                f"{result.errors[0].outcome.error if result.errors else 'there are no tasks'}"
            )
    return 0


async def evaluate_model(config: EvalsConfig) -> list[EvalResult]:
    """All environments of the configuration, one after the other."""
    path = fetch_model(config.model.name)
    if config.client is not None:
        key = os.environ.get(config.client.api_key_var)
        client = config.client
        return await _evaluate(config, path, client.base_url, key, config.model.name, client.timeout)
    async with served_model(path) as server:
        return await _evaluate(config, path, [server.base_url], server.api_key, str(path), 1200.0)


async def _evaluate(
    config: EvalsConfig, path: Path, base_urls: Sequence[str], key: str | None, model: str, timeout: float
) -> list[EvalResult]:
    renderer = ChatRenderer(str(path))
    sampling = config.sampling
    async with InferenceClient(base_urls, api_key=key, timeout=timeout, model=model) as client:
        await client.wait_ready(timeout)
        player = RolloutPlayer(
            sampler=client,
            renderer=renderer,
            params=SamplingParams(
                max_tokens=sampling.max_tokens or config.seq_len,
                temperature=_given(sampling.temperature, 1.0),
                top_p=_given(sampling.top_p, 1.0),
                top_k=_given(sampling.top_k, -1),
                min_tokens=_given(sampling.min_tokens, 0),
            ),
            seq_len=config.seq_len,
            seed=_given(sampling.seed, config.seed),
            timeout=config.rollout_timeout,
            retries=1,
            max_concurrent=config.max_concurrent,
        )
        return [
            await evaluate(
                env,
                player,
                split=settings.split,
                num_examples=settings.num_examples,
                rollouts_per_example=settings.rollouts_per_example,
            )
            for env, settings in zip(load_environments(config.env), config.env, strict=True)
        ]


def _given(value: Number | None, default: Number) -> Number:
    return default if value is None else value


def write_result(config: EvalsConfig, result: EvalResult) -> None:
    """Write the summary and every rollout of one environment under `<output_dir>/evals/`."""
    directory = config.output_dir / "evals"
    directory.mkdir(parents=True, exist_ok=True)
    passed = sum(reward >= 1.0 for reward in result.rewards)
    summary: dict[str, Any] = {
        "env": result.env_name,
        "model": config.model.name,
        "mean_reward": result.mean_reward if result.rewards else None,
        "exact": passed / len(result.rewards) if result.rewards else None,
        "ci95": wilson_interval(passed, len(result.rewards)),
        "n": len(result.rewards),
        "errored": result.errored,
        "seconds": result.seconds,
        **result.metrics(),
    }
    write_file(directory / f"{result.env_name}.json", json.dumps(summary, indent=1))
    lines = [
        json.dumps(
            {
                "task_id": rollout.task.id,
                "data": dict(rollout.task.data),
                "reward": rollout.reward,
                "components": dict(rollout.outcome.components),
                "stop_reason": rollout.outcome.stop_reason,
                "error": rollout.outcome.error,
            },
            ensure_ascii=False,
        )
        for rollout in [*result.rollouts, *result.errors]
    ]
    write_file(directory / f"{result.env_name}.jsonl", "\n".join(lines) + "\n")
