"""Main loop of the orchestrator: collect and write batches, update the engines to new weights, evaluate."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from buckeye.base import heartbeat
from buckeye.base.faults import fault_point
from buckeye.base.keys import key_for
from buckeye.base.process import die_with_parent, forbid_tracing, run_identity
from buckeye.base.turns import turns
from buckeye.config.environments import EnvConfig, EvalEnvConfig
from buckeye.config.orchestrator import OrchestratorConfig
from buckeye.errors import RunError, UsageError
from buckeye.inference.client import InferenceClient, SamplingParams
from buckeye.inference.render import ChatRenderer
from buckeye.monitor.log import SUCCESS, run_log, setup_logging
from buckeye.monitor.metrics import MetricsLog
from buckeye.monitor.rollouts import ROLLOUTS_FOLDER, rollouts_file
from buckeye.monitor.run_watch import RunWatch
from buckeye.orchestrator.advantages import RewardShaping, check_advantage, reward_shaping
from buckeye.orchestrator.batch import (
    Advantages,
    BatchSender,
    advantages_of,
    batch_metrics,
    make_batch,
    prune_rollouts,
    write_rollouts,
)
from buckeye.orchestrator.collected_groups import CollectedGroups
from buckeye.orchestrator.collector import GroupCollector, GroupRunner
from buckeye.orchestrator.coroutines import collect_garbage, run_until_first_ends, run_until_stopped
from buckeye.orchestrator.deterministic_sampling import DeterministicSampling, deterministic_sampling
from buckeye.orchestrator.environments import (
    NamedEnvironment,
    check_environments,
    choose_evaluation_split,
    fallback_note,
    few_tasks_warning,
    load_environments,
    load_split,
    prompt_lengths,
)
from buckeye.orchestrator.evaluation_schedule import EvaluationSchedule, sampling_params
from buckeye.orchestrator.loop_watch import SWITCH_SECONDS, LoopWatch, StepTimes, Throughput
from buckeye.orchestrator.pauses import EnvironmentPauses
from buckeye.orchestrator.policy import derive_seed
from buckeye.orchestrator.rollout import Group
from buckeye.orchestrator.rollout_runner import RecordingRolloutRunner, recording_runner
from buckeye.orchestrator.rollout_workers import RolloutWorkers, shared_environments
from buckeye.orchestrator.sampling_bias import CollectionWatch
from buckeye.orchestrator.step_logs import log_first_replies, log_untrained_rollouts
from buckeye.orchestrator.task_sampler import TaskSampler
from buckeye.orchestrator.teacher import Teacher
from buckeye.orchestrator.weights_watcher import BrokenServers, WeightsWatcher
from buckeye.transport.checkpoint import read_orchestrator_state, resolve_checkpoint

log = logging.getLogger(__name__)


_STARTUP_TIMEOUT = 1800.0


def run_orchestrator(config: OrchestratorConfig) -> bool:
    """Run until `max_steps` batches are written, or until SIGTERM or SIGINT.

    Return False if a signal stopped the orchestrator.
    """
    die_with_parent()
    forbid_tracing()
    heartbeat.start()
    setup_logging(config.log.level, "orchestrator", run_log(config.output_dir))
    sys.setswitchinterval(SWITCH_SECONDS)
    return asyncio.run(run_until_stopped(Orchestrator(config).run()))


class Orchestrator:
    """Orchestrator of one run. `run` runs the main loop."""

    def __init__(self, config: OrchestratorConfig) -> None:
        self.config = config
        self.identity = run_identity()
        self.metrics = MetricsLog(config.output_dir / "metrics.jsonl")
        self.sender = BatchSender(config.output_dir, self.identity)
        self.broken_servers = BrokenServers(config.output_dir, self.identity)
        self.turns = turns()
        self.renderer = ChatRenderer(config.model.name)
        self.client = InferenceClient(
            config.client.base_url,
            api_key=key_for(config.client.api_key_var, config.client.base_url[0]) or None,
            timeout=config.client.timeout,
            model=config.model.name,
            recovery_timeout=_STARTUP_TIMEOUT,
            keep_kv_cache=config.keep_kv_cache,
            turns=self.turns,
            on_restart_needed=self.broken_servers.report,
        )
        self.state = self._initial_state()
        self.start_step = int(self.state["step"])
        self.seed = config.seed if config.sampling.seed is None else config.sampling.seed
        self.deterministic: DeterministicSampling | None = None
        self.throughput = Throughput()
        self.times = StepTimes(self.client)
        self.loop_watch = LoopWatch()
        self.run_watch = RunWatch(config.output_dir)
        self.collection = CollectionWatch()
        self._poor_steps = 0
        self.shaping = reward_shaping(config)
        check_advantage(config.advantage)
        self.teacher = None if config.teacher is None else Teacher(config.teacher)
        self.workers: RolloutWorkers | None = None
        own = config.env if config.workers == 1 else shared_environments(config, config.workers)
        self.environments = self._load(own)
        self.sampler = TaskSampler(self.environments, seed=config.seed)
        self.evaluations = EvaluationSchedule(
            config,
            self._load_evaluation_environments(),
            self.metrics,
            self.identity,
            start_step=self.start_step,
            make_runner=self._evaluation_runner,
        )

    async def run(self) -> None:
        """Start up, collect a batch per step, and finish with an evaluation."""
        config = self.config
        log.info("Starting orchestrator")
        self._check_splits()
        async with contextlib.AsyncExitStack() as servers:
            await servers.enter_async_context(self.client)
            if self.teacher is not None:
                await servers.enter_async_context(self.teacher)
                await self.teacher.start(self.renderer)
            log.info("Waiting for inference pool to be ready")
            heartbeat.report("its servers", on="inference")
            await asyncio.gather(
                self.client.wait_ready(_STARTUP_TIMEOUT), check_environments(self.environments)
            )
            log.log(SUCCESS, "Inference pool ready")
            if self.turns is not None and not all(replica.can_sleep for replica in self.client.replicas):
                log.info("This vLLM cannot release memory: it only pauses while the trainer trains")
            self.deterministic = deterministic_sampling(config, self.client)
            heartbeat.ready()
            if self.start_step:
                log.info("Resuming training from checkpoint step `%d`", self.start_step)
            else:
                log.info("Training from scratch. Resetting weights to base model")
            log.info("Starting orchestrator loop (max_steps=%s)", config.max_steps or "infinite")
            collector = self._collector()
            if self.workers is not None:
                await servers.enter_async_context(self.workers)
            watcher = WeightsWatcher(
                config.output_dir / "weights",
                self.client,
                self.identity,
                first_version=self.start_step,
                newest_possible=lambda: int(self.state["step"]),
                due=lambda: self.evaluations.due,
                on_update=partial(self._set_version, collector),
            )
            self.loop_watch.start()
            try:
                background = [watcher.run(), self.sender.run(), self.broken_servers.run(), collect_garbage()]
                background += [] if self.workers is None else [self.workers.run()]
                evaluations = self.evaluations.run(watcher)
                await run_until_first_ends(self._steps(collector, watcher), evaluations, *background)
            finally:
                self.loop_watch.stop()
                await collector.close()
        log.log(SUCCESS, "Orchestrator finished.")

    def _initial_state(self) -> dict[str, Any]:
        ckpt = self.config.ckpt
        fresh = {"step": 0, "next_group": 0, "pending": [], "tokens": 0, "samples": 0, "problems": 0}
        if ckpt is None or ckpt.resume_step is None:
            return fresh
        info = resolve_checkpoint(self.config.output_dir / "checkpoints", ckpt.resume_step)
        return {**fresh, **read_orchestrator_state(info), "step": info.step}

    def _load(self, settings: Sequence[EnvConfig]) -> list[NamedEnvironment]:
        config = self.config
        logs = config.output_dir / "logs" / f"attempt_{self.identity.attempt}"
        return load_environments(settings, rollout_timeout=config.rollout_timeout, log_dir=logs)

    def _load_evaluation_environments(self) -> list[tuple[EvalEnvConfig, NamedEnvironment]]:
        """Return the environments to evaluate on. Environments of the run are reused, not loaded twice."""
        settings = self.config.eval
        evaluated = self.config.evaluation_environments
        if settings is None or settings.env:
            return list(zip(evaluated, self._load(evaluated), strict=True))
        reused = [
            replace(env, rollout_settings=replace(env.rollout_settings, temperature=None))
            for env in self.environments
        ]
        return list(zip(evaluated, reused, strict=True))

    def _check_splits(self) -> None:
        """Raise `UsageError` before the first step if tasks are missing or every prompt exceeds `seq_len`."""
        for settings, env in self.evaluations.environments:
            tasks = load_split(env, choose_evaluation_split(env, settings.split))
            if (warning := few_tasks_warning(env.name, settings.id, len(tasks))) is not None:
                log.warning("%s", warning)
            if note := fallback_note(env, settings.split):
                log.warning("%s", note)
        for env in self.environments:
            lengths = prompt_lengths(load_split(env, "train"), self.renderer)
            if lengths and min(lengths) >= self.config.seq_len:
                raise UsageError(
                    f"no prompt of environment {env.name} leaves room for a reply: the shortest of the first "
                    f"{len(lengths)} has {min(lengths)} tokens, and seq_len is {self.config.seq_len}",
                    code="BK-PROMPT-TOO-LONG",
                    hint="raise --seq-len, or use shorter tasks",
                )

    def _collector(self) -> GroupCollector:
        config = self.config
        seed = derive_seed(self.seed, "rollouts")
        runner: GroupRunner
        if config.workers == 1:
            runner = self._runner(seed, sampling_params(config), self.shaping)
        else:
            runner = self.workers = RolloutWorkers(
                config,
                self.client,
                seed=seed,
                version=lambda: collector.version,
                evaluates=lambda: self.evaluations.version_in_evaluation is not None,
            )
        pauses = EnvironmentPauses(
            [env.name for env in self.environments], config.env_pause, config.output_dir
        )
        collector = GroupCollector(
            self.sampler,
            runner,
            config,
            pauses,
            state=self.state,
            deterministic=self.deterministic is not None,
            version_in_evaluation=lambda: self.evaluations.version_in_evaluation,
        )
        return collector

    def _set_version(self, collector: GroupCollector, version: int) -> None:
        collector.set_version(version)
        if self.workers is not None:
            self.workers.send_servers()  # at once, so that no worker samples under the old version

    def _runner(
        self, seed: int, params: SamplingParams, shaping: RewardShaping | None = None
    ) -> RecordingRolloutRunner:
        sampler = self.deterministic or self.client
        return recording_runner(
            self.config, sampler, self.renderer, seed=seed, params=params, shaping=shaping
        )

    def _evaluation_runner(
        self, purpose: str, version: int, params: SamplingParams
    ) -> RecordingRolloutRunner:
        self._begin_batches(purpose, version)
        return self._runner(derive_seed(self.seed, purpose, version), params)

    async def _steps(self, collector: GroupCollector, watcher: WeightsWatcher) -> None:
        config = self.config
        step = self.start_step
        await self.evaluations.wait_until_evaluated(step - 1, watcher)
        log.info("Waiting for weight checkpoint %d", step)
        await watcher.wait_for_version(step, config.weights_timeout)
        while config.max_steps is None or step < config.max_steps:
            await self._step(step, collector, watcher)
            step += 1
        await self.evaluations.wait_until_evaluated(step, watcher)

    async def _step(self, step: int, collector: GroupCollector, watcher: WeightsWatcher) -> None:
        log.info("Starting orchestrator step %d", step)
        with self.times.stopwatch.of("evaluate"):
            # deterministic sampling: no inference batch mixes requests of evaluations and training
            if self.deterministic is not None:
                await self.evaluations.wait_until_evaluated(step, watcher)
        started = time.monotonic()
        self._begin_batches("step", step)
        with self.times.stopwatch.of("collect"):
            collected = await self._collect(step, collector)
        if step == 0:
            log_first_replies(collected.groups)
        heartbeat.report(f"writes batch {step}")
        # raises before the batch is written
        measured = await asyncio.to_thread(batch_metrics, step, collected.groups, self.config)
        if self.turns is not None:
            await self._end_turn(step, watcher)
        with self.times.stopwatch.of("write_batch"):
            measured |= await self._hand_over(step, collected, collector)
        times = {
            "time/step": time.monotonic() - started,
            "time/loop_held_up": self.loop_watch.take_seconds(),
            **self.loop_watch.take_lateness(),
            **self.times.record(collected, watcher),
        }
        await self._report(step, collected, collector, measured | times)

    async def _end_turn(self, step: int, watcher: WeightsWatcher) -> None:
        """Give the device to the trainer. The next weights that it publishes end its turn."""
        with self.times.stopwatch.of("evaluate"):
            await self.evaluations.wait_until_evaluated(step, watcher)
        heartbeat.report(f"puts the engine to sleep before batch {step}", on="inference")
        fault_point("turn.end")
        with self.times.stopwatch.of("sleep"):
            await self.client.sleep()
        fault_point("turn.ended")

    async def _collect(self, step: int, collector: GroupCollector) -> CollectedGroups:
        """Collect the batch of a step. If this fails, write the finished rollouts, and raise the error."""
        try:
            return await collector.collect(step)
        except RunError:
            collected = collector.collected
            left_over = [("left_over", group) for group in collected.groups]
            await self._write_rollouts(step, [], [], [*collected.dropped_groups, *left_over])
            raise

    def _begin_batches(self, purpose: str, number: int) -> None:
        if self.deterministic is not None:
            self.deterministic.begin(derive_seed(self.seed, purpose, number))

    async def _hand_over(
        self, step: int, collected: CollectedGroups, collector: GroupCollector
    ) -> dict[str, float]:
        """Write the rollouts and the batch. Return the metrics of the teacher, if there is one."""
        groups = collected.groups
        scores, metrics = (None, {}) if self.teacher is None else await self.teacher.score(step, groups)
        self.state = {
            **self.state,
            **collector.state(),
            "step": step + 1,
            "tokens": self.state["tokens"] + sum(r.total_tokens for g in groups for r in g.scored),
            "samples": self.state["samples"] + sum(len(g.scored) for g in groups),
            "problems": self.state["problems"] + len(groups),
        }
        advantages = await asyncio.to_thread(advantages_of, groups, self.config)
        await self._write_rollouts(step, groups, advantages, collected.dropped_groups)
        make = partial(make_batch, step, groups, advantages, self.config, state=self.state, teacher=scores)
        await self.sender.write(await asyncio.to_thread(make))
        return metrics

    async def _write_rollouts(
        self,
        step: int,
        trained: Sequence[Group],
        advantages: Advantages,
        dropped: Sequence[tuple[str, Group]],
    ) -> None:
        folder = self.config.output_dir / ROLLOUTS_FOLDER
        files: dict[str, tuple[Sequence[tuple[str | None, Group]], Advantages | None]] = {
            rollouts_file(step): ([(None, g) for g in trained], advantages),
            rollouts_file(step, dropped=True): (dropped, None),
        }
        for name, (groups, group_advantages) in files.items():
            if groups:
                await write_rollouts(folder / name, groups, self.renderer.decode_in_thread, group_advantages)
            else:
                (folder / name).unlink(missing_ok=True)  # left by an earlier attempt
        if self.config.rollouts.keep is not None:
            prune_rollouts(folder, step, keep=self.config.rollouts.keep)

    async def _report(
        self, step: int, collected: CollectedGroups, collector: GroupCollector, metrics: dict[str, float]
    ) -> None:
        tokens = sum(r.total_tokens for g in collected.groups for r in g.scored)
        by_environment = await asyncio.to_thread(collected.environment_metrics)
        unaccounted = collector.unaccounted
        metrics |= {
            "perf/throughput": self.throughput.add(tokens, metrics["time/step"]),
            "progress/total_tokens": self.state["tokens"],
            "progress/total_samples": self.state["samples"],
            "progress/total_problems": self.state["problems"],
            "reward/played": statistics.fmean(collected.sampled_rewards),
            "policy_version": collector.version,
            "sampler/deterministic": float(self.deterministic is not None),
            "rollouts/errored": len(collected.errors),
            **{f"rollouts/{name}": count for name, count in collected.account().items()},
            "rollouts/unaccounted": unaccounted,
            "batches/written_again": self.sender.rewritten_batches,
            **{f"groups/dropped_{reason}": n for reason, n in collected.dropped.items()},
            **collector.metrics(),
            **self.collection.record(collected),
            **by_environment,
            **self.client.metrics(),
            **({} if self.workers is None else self.workers.metrics()),
        }
        await self.metrics.write_async("orchestrator", step, metrics)
        log.log(
            SUCCESS,
            "Step %d | Time: %.2fs | Reward: %.4f | Throughput: %.1f tokens/s"
            " | Seq. Length: %.1f tokens/sample",
            step,
            metrics["time/step"],
            metrics["reward/mean"],
            metrics["perf/throughput"],
            metrics["seq_len/mean"],
        )
        self._poor_steps += collected.level()[0] != SUCCESS
        log_untrained_rollouts(step, collected, unaccounted, poor_steps=self._poor_steps)
        await asyncio.to_thread(self.run_watch.check)  # it reads all steps again
