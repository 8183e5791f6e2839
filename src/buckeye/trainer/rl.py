"""The trainer process of a reinforcement-learning run: batches in, weights out."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from buckeye.config.trainer import TrainerConfig
from buckeye.monitor.log import SUCCESS
from buckeye.monitor.metrics import MetricsLog
from buckeye.monitor.stopwatch import Stopwatch
from buckeye.process import RunIdentity, StopFlag, run_identity
from buckeye.trainer.batch_loss import BatchLoss, check_batch, samples_to_train
from buckeye.trainer.inbox import Inbox
from buckeye.trainer.learner import Learner, finite_only, format_step
from buckeye.trainer.losses import check_loss
from buckeye.trainer.output import Output
from buckeye.trainer.reference import load_reference
from buckeye.trainer.setup import build_learner, find_resume, trainer_process
from buckeye.transport.batches import Batch, remove_batch, write_batch

logger = logging.getLogger(__name__)

_KEPT_SKIPPED_BATCHES = 10


def run_trainer(config: TrainerConfig) -> bool:
    """Train until `max_steps`, until the orchestrator has no more batches, or until SIGTERM or SIGINT;
    commits a checkpoint before it returns. True if it is done, False if it was stopped.

    Under `torchrun`'s variables it is one rank of several. Raises `TransportError` if batches stop arriving
    or are damaged, `CheckpointError` if there is nothing to resume from, `UsageError` for a loss or a model
    that cannot be used.
    """
    stop = StopFlag().install()
    with trainer_process(config, "trainer") as ranks:
        logger.info("Starting trainer on %s (rank %d of %d)", ranks.device, ranks.rank, ranks.count)
        check_loss(config.loss)
        learner = build_learner(config, ranks, find_resume(config), max_steps=config.max_steps)
        return RLTrainer(config, learner, stop, run_identity()).run()


class RLTrainer:
    """The loop of `run_trainer`. Weights version N is the model after N steps; batch N makes version N+1."""

    def __init__(
        self,
        config: TrainerConfig,
        learner: Learner,
        stop: StopFlag,
        identity: RunIdentity,
    ) -> None:
        self.config = config
        self.learner = learner
        self.ranks = learner.ranks
        self.batch_loss = BatchLoss(config, learner, load_reference(config, learner))
        self.metrics = MetricsLog(config.output_dir / "metrics.jsonl")
        self.stopwatch = Stopwatch("wait", "compute", "publish", "checkpoint", idle="wait")
        self.inbox = Inbox(
            root=config.output_dir / "batches",
            identity=identity,
            ranks=self.ranks,
            stop=stop,
            timeout_seconds=config.batch_timeout,
        )
        self.output = Output.of(config, learner, identity)
        self._orchestrator_state: Mapping[str, Any] = {}

    @property
    def step(self) -> int:
        """Optimizer steps done, which is also the version of the weights."""
        return self.learner.progress.step

    def run(self) -> bool:
        """Publish the weights to start from, then turn batches into weights. True if all steps are done, or
        all that there are batches for."""
        self._publish()
        ended = False
        while not self._complete():
            with self.stopwatch.of("wait"):
                batch = self.inbox.next_batch(self.step)
            if batch is None:
                ended = self.inbox.ended(self.step)
                why = "No more batches come: ending" if ended else "Stopping on request"
                logger.info("%s at step %d", why, self.step)
                break
            self._train(batch)
            if self.output.due():
                self._checkpoint()
        self._checkpoint()
        self.metrics.close()
        done = ended or self._complete()
        if done:
            logger.log(SUCCESS, "RL trainer finished!")
        return done

    def _complete(self) -> bool:
        return self.config.max_steps is not None and self.step >= self.config.max_steps

    def _publish(self) -> None:
        with self.stopwatch.of("publish"):
            self.output.publish(versions=self.config.max_async_level + 2)

    def _checkpoint(self) -> None:
        with self.stopwatch.of("checkpoint"):
            self.output.checkpoint(self._orchestrator_state)

    def _train(self, batch: Batch) -> None:
        step, started = self.step, time.monotonic()
        logger.info("Starting training step %d", step)
        check_batch(batch, self.learner.policy.model.config.vocab_size)
        samples = samples_to_train(batch, self.config.loss)
        tokens = sum(len(s.token_ids) for s in batch.samples)
        with self.stopwatch.of("compute"):
            logger.info("Starting forward and backward pass (batch_size=%d)", len(samples))
            record = self.batch_loss.backward(batch, samples)
            update = self.learner.update(record["loss"], tokens=tokens, samples=len(batch.samples))
        if not update.applied:
            self._keep_skipped(batch)
        self._orchestrator_state = batch.orchestrator_state
        self._publish()
        if self.ranks.first:
            remove_batch(self.inbox.root, step)
        seconds = time.monotonic() - started
        values = {
            **record,
            "samples": len(batch.samples),
            **update.values(),
            "seconds": seconds,
            **self.learner.speed(tokens, seconds),
            **self.stopwatch.take(),
        }
        logger.log(SUCCESS, format_step(step, values))
        if self.ranks.first:
            self.metrics.write("trainer", step, finite_only(values))

    def _keep_skipped(self, batch: Batch) -> None:
        """Write a batch that could not be learned from to `skipped/`, to be looked at; the first few only."""
        root = self.config.output_dir / "skipped"
        if not self.ranks.first:
            return
        if len(list(root.glob("step_*"))) >= _KEPT_SKIPPED_BATCHES:
            logger.warning("Batch %d is not kept: %s holds %d.", batch.step, root, _KEPT_SKIPPED_BATCHES)
            return
        path = write_batch(root, batch, identity=self.inbox.identity)
        logger.warning("Batch %d is kept in %s.", batch.step, path)
