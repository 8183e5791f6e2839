"""`eval @ FILE` and `evals`: a model on the environments of a configuration, token by token, as training
measures it. The engine is its own unless a server is given."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from buckeye.base.keys import key_for
from buckeye.config.environments import EvalsConfig
from buckeye.errors import RunError
from buckeye.inference.client import InferenceClient, SamplingParams
from buckeye.inference.render import ChatRenderer
from buckeye.launch.gateways import DEFAULT_ROLLOUTS, hosts_here
from buckeye.launch.serve import served_model
from buckeye.monitor.log import setup_logging
from buckeye.orchestrator.environments import fallback_note, load_environments, names_of
from buckeye.orchestrator.evaluation import EvalResult, evaluate_all, sampling_record
from buckeye.orchestrator.player import RolloutPlayer
from buckeye.sizing.model import fetch_model

log = logging.getLogger(__name__)
Number = TypeVar("Number", int, float)


def run_evals(config: EvalsConfig) -> int:
    """Evaluate, print a line per environment, write `evals/<env>.json` and `.jsonl`; exit code 0.

    Raises RunError, after writing, if an environment has no scored rollout at all.
    """
    setup_logging(config.log.level, "evals", None)
    names_of(config.env)  # what is wrong with them is said before an engine is started
    folder = config.output_dir / "evals"
    with hosts_here(config.env, folder / "gateway.log", rollouts=config.max_concurrent or DEFAULT_ROLLOUTS):
        results = asyncio.run(evaluate_model(config, folder))
    for result in results:
        if not result.rewards:
            raise RunError(
                f"no rollout of {result.env_name} could be scored; the first failed with: "
                f"{result.errors[0].outcome.error if result.errors else 'there are no tasks'}"
            )
    return 0


async def evaluate_model(config: EvalsConfig, folder: Path | None = None) -> list[EvalResult]:
    """All environments of the configuration, one after the other; each is written to the `folder`."""
    path = fetch_model(config.model.name)
    if config.client is not None:
        api_key = key_for(config.client.api_key_var, config.client.base_url[0]) or None
        client = config.client
        model, timeout = config.model.name, client.timeout
        return await _evaluate(config, path, client.base_url, api_key, model, timeout, folder)
    async with served_model(path) as server:
        return await _evaluate(config, path, [server.base_url], server.api_key, str(path), 1200.0, folder)


async def _evaluate(
    config: EvalsConfig,
    path: Path,
    base_urls: Sequence[str],
    api_key: str | None,
    model: str,
    timeout: float,
    folder: Path | None,
) -> list[EvalResult]:
    params = _sampling_params(config)
    async with InferenceClient(base_urls, api_key=api_key, timeout=timeout, model=model) as client:
        await client.wait_ready(timeout)
        player = RolloutPlayer(
            sampler=client,
            renderer=ChatRenderer(str(path)),
            params=params,
            seq_len=config.seq_len,
            seed=_given(config.sampling.seed, config.seed),
            timeout=config.rollout_timeout,
            retries=1,
            max_concurrent=config.max_concurrent,
        )
        environments = load_environments(config.env)
        for env, settings in zip(environments, config.env, strict=True):
            if note := fallback_note(env, settings.split):
                log.warning("%s", note)
        return await evaluate_all(
            list(zip(config.env, environments, strict=True)),
            player,
            directory=folder,
            measured={"model": config.model.name, **sampling_record(params, config.seq_len)},
        )


def _sampling_params(config: EvalsConfig) -> SamplingParams:
    sampling = config.sampling
    return SamplingParams(
        max_tokens=sampling.max_tokens or config.seq_len,
        temperature=_given(sampling.temperature, 1.0),
        top_p=_given(sampling.top_p, 1.0),
        top_k=_given(sampling.top_k, -1),
        min_tokens=_given(sampling.min_tokens, 0),
    )


def _given(value: Number | None, default: Number) -> Number:
    return default if value is None else value
