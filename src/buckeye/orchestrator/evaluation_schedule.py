"""Evaluations during a run. Training continues, and each evaluation uses one policy version."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from buckeye.base import heartbeat
from buckeye.base.disk import write_when_room_async
from buckeye.base.process import RunIdentity
from buckeye.base.storage import step_directory, utf8, write_file
from buckeye.config.environments import EvalEnvConfig
from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.inference.client import SamplingParams
from buckeye.monitor.intervals import mean_pass_at_k
from buckeye.monitor.metrics import MetricsLog, read_run_metrics
from buckeye.orchestrator.environments import NamedEnvironment
from buckeye.orchestrator.evaluation import EvalResult, evaluate
from buckeye.orchestrator.rollout_runner import RolloutRunner
from buckeye.orchestrator.weights_watcher import WeightsWatcher
from buckeye.transport.weights import has_weights

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.02

RunnerFactory = Callable[[str, int, SamplingParams], RolloutRunner]
"""Function that makes a `RolloutRunner` for a purpose, a policy version and sampling parameters."""


class EvaluationSchedule:
    """Scheduler of evaluations: of every `interval`-th version, and of `last`, the final version of the run.

    When the engines have the version `due`, the weights watcher keeps them at this version until its
    evaluation ends. Meanwhile, training rollouts continue with this version, up to the limit of
    `max_async_level`.
    """

    def __init__(
        self,
        config: OrchestratorConfig,
        environments: Sequence[tuple[EvalEnvConfig, NamedEnvironment]],
        metrics: MetricsLog,
        identity: RunIdentity,
        *,
        start_step: int,
        make_runner: RunnerFactory,
    ) -> None:
        self._config = config
        self.environments = environments
        self._metrics = metrics
        self._identity = identity
        self._make_runner = make_runner
        self.last = None if config.max_steps is None else max(config.max_steps, start_step)
        """Final version of the run; None if unknown."""
        self.version_in_evaluation: int | None = None
        """Version whose evaluation runs now, or None."""
        self._evaluated = evaluated_versions(config.output_dir / "metrics.jsonl", start_step)
        self._next = self._first_unevaluated(start_step) if config.eval is not None else start_step

    @property
    def due(self) -> int | None:
        """Next version to evaluate, or None."""
        settings, version = self._config.eval, self._next
        if settings is None:
            return None
        while version in self._evaluated or not self._is_due(version):
            if self.last is not None and version >= self.last:
                return None
            version += settings.interval - version % settings.interval
            version = version if self.last is None else min(version, self.last)
        return version

    async def run(self, watcher: WeightsWatcher) -> None:
        """Evaluate each due version as soon as the engines have it, until cancelled."""
        while True:
            due = self.due
            if due is None or due != watcher.version:
                await asyncio.sleep(_POLL_SECONDS)
                continue
            self.version_in_evaluation = due
            await self._evaluate(due)
            self.version_in_evaluation = None
            self._next = due + 1

    async def wait_until_evaluated(self, version: int, watcher: WeightsWatcher) -> None:
        """Wait until all due versions up to `version` are evaluated. Raise `RunError` if weights time out."""
        while (due := self.due) is not None and due <= version:
            await watcher.wait_for_version(due, self._config.weights_timeout)
            while self.due == due:
                await asyncio.sleep(_POLL_SECONDS)

    def _is_due(self, version: int) -> bool:
        settings = self._config.eval
        assert settings is not None
        if version == self.last:
            return True
        return version % settings.interval == 0 and (version > 0 or settings.eval_base_model)

    def _first_unevaluated(self, start_step: int) -> int:
        """Return the first version to evaluate: one that an earlier attempt missed, or `start_step`.

        If an earlier attempt ended during an evaluation, training was ahead of this evaluation by at most
        `max_async_level` + 1 steps.
        """
        for version in range(max(0, start_step - self._config.max_async_level - 1), start_step):
            if version in self._evaluated or not self._is_due(version):
                continue
            if has_weights(self._config.output_dir / "weights", version, run_id=self._identity.run_id):
                return version
            if self._evaluated:
                log.warning("Step %d cannot be evaluated: its weights were deleted", version)
        return start_step

    async def _evaluate(self, version: int) -> None:
        settings = self._config.eval
        assert settings is not None
        log.info("Running evals for checkpoint step %d", version)
        heartbeat.report(f"rollouts of the evaluation of step {version}", on="inference")
        params = replace(sampling_params(self._config), **settings.sampling.model_dump(exclude_none=True))
        results = await evaluate_all(
            self.environments,
            self._make_runner("eval", version, params),
            num_examples=settings.num_examples,
            rollouts_per_example=settings.rollouts_per_example,
            directory=step_directory(self._config.output_dir / "evals", version),
            measured={
                "model": self._config.model.name,
                "step": version,
                "attempt": self._identity.attempt,
                **sampling_record(params, self._config.seq_len),
            },
        )
        # one record for all environments, so that a resume repeats a partial evaluation
        metrics = {name: value for result in results for name, value in result.metrics().items()}
        await self._metrics.write_async("eval", version, metrics)


def sampling_params(config: OrchestratorConfig) -> SamplingParams:
    """Return the sampling parameters for training."""
    sampling = config.sampling
    return SamplingParams(max_tokens=sampling.max_tokens or config.seq_len, temperature=sampling.temperature)


def evaluated_versions(metrics: Path, start_step: int) -> set[int]:
    """Return the versions up to `start_step` that earlier attempts have evaluated.

    Later versions belong to an abandoned branch of the training.
    """
    return {version for version in read_run_metrics(metrics).of("eval") if version <= start_step}


async def evaluate_all(
    environments: Sequence[tuple[EvalEnvConfig, NamedEnvironment]],
    runner: RolloutRunner,
    *,
    num_examples: int,
    rollouts_per_example: int,
    directory: Path,
    measured: Mapping[str, Any],
) -> list[EvalResult]:
    """Evaluate on one environment after the other, and return the results.

    `num_examples` and `rollouts_per_example` are defaults for environments that do not set them. For each
    environment, write `<env>.json` (figures) and `<env>.jsonl` (rollouts) to `directory`. The figures include
    `measured`: the model, the `step`, and the sampling settings.
    """
    results = []
    for settings, env in environments:
        examples, rollouts = settings.num_examples, settings.rollouts_per_example
        result = await evaluate(
            env,
            runner,
            split=settings.split,
            num_examples=num_examples if examples is None else examples,
            rollouts_per_example=rollouts_per_example if rollouts is None else rollouts,
        )
        results.append(result)
        log.log(result.level, result.summary())
        step = measured["step"]
        if {*result.versions} - {step}:
            names = ", ".join(map(str, result.versions))
            log.warning(
                "The evaluation of step %d on %s sampled from policy versions %s", step, env.name, names
            )
        environment_record = {"id": settings.id, "args": dict(settings.args), "split": result.split}
        await write_evaluation(directory, result, {**measured, **environment_record})
    return results


def sampling_record(params: SamplingParams, seq_len: int) -> dict[str, Any]:
    """Return the sampling parameters for the figures of an evaluation."""
    names = ("temperature", "top_p", "top_k", "min_tokens", "max_tokens")
    return {"sampling": {name: getattr(params, name) for name in names}, "seq_len": seq_len}


async def write_evaluation(directory: Path, result: EvalResult, measured: Mapping[str, Any]) -> None:
    """Write the figures and the rollouts of one environment."""
    for path, text in (await asyncio.to_thread(_files, directory, result, measured)).items():
        write = partial(write_file, path, text)
        await write_when_room_async(path, write, what=f"the evaluation {path.name}", needed=len(text))


def _files(directory: Path, result: EvalResult, measured: Mapping[str, Any]) -> dict[Path, bytes]:
    """Return the content of both files, in the order to write them.

    The file of rollouts comes last, because it marks a complete evaluation.
    """
    figures = {**measured, **_figures(result)}
    lines = [
        rollout.evaluation_line(index % result.rollouts_per_example)
        for index, rollout in enumerate(result.all_rollouts)
    ]
    return {
        directory / f"{result.env_name}.json": utf8(json.dumps(figures, indent=1, ensure_ascii=False)),
        directory / f"{result.env_name}.jsonl": b"".join(lines),
    }


def _figures(result: EvalResult) -> dict[str, Any]:
    """Return the figures of an evaluation. `ci95` is the 95 % confidence interval of `exact`.

    The interval counts related tasks as one cluster: tasks whose data have the same first item in the list
    `lemma_ids`. A task without `lemma_ids` is a separate cluster.
    """
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
    if (exact := mean_pass_at_k(result.tasks, 1)) is not None:
        figures |= {
            "mean_reward": result.mean_reward,
            "exact": exact.value,
            "ci95": (exact.low, exact.high),
        }
    return figures
