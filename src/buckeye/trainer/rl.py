"""The trainer process of a reinforcement-learning run: batches in, weights out."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from buckeye.config.trainer import LossConfig, TrainerConfig
from buckeye.errors import TransportError
from buckeye.monitor.log import SUCCESS
from buckeye.monitor.metrics import MetricsLog
from buckeye.process import RunIdentity, StopFlag, run_identity
from buckeye.trainer.head import token_logprobs
from buckeye.trainer.inbox import Inbox
from buckeye.trainer.learner import Learner, finite_only, format_step
from buckeye.trainer.losses import LossSums, RatioLimits, sequence_ratio_loss, token_ratio_loss
from buckeye.trainer.output import Output
from buckeye.trainer.rows import Row, make_row
from buckeye.trainer.setup import build_learner, find_resume, trainer_process
from buckeye.transport.batches import Batch, Sample, remove_batch

logger = logging.getLogger(__name__)

_TOKEN_SUMS = ("entropy", "mismatch_kl", "masked_low", "masked_high", "masked_sequence")
_SUMS = ("loss", "trained_tokens", *_TOKEN_SUMS)


def run_trainer(config: TrainerConfig) -> bool:
    """Train until `max_steps`, or until SIGTERM or SIGINT; commits a checkpoint before it returns. True if
    all steps are done, False if it was stopped.

    Under `torchrun`'s variables it is one rank of several. Raises `TransportError` if batches stop arriving
    or are damaged, `CheckpointError` if there is nothing to resume from.
    """
    stop = StopFlag().install()
    with trainer_process(config, "trainer") as ranks:
        logger.info("Starting trainer on %s (rank %d of %d)", ranks.device, ranks.rank, ranks.count)
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
        self.metrics = MetricsLog(config.output_dir / "metrics.jsonl")
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
        """Publish the weights to start from, then turn batches into weights. True if all steps are done."""
        self._publish()
        while not self._complete():
            waiting = time.monotonic()
            batch = self.inbox.next_batch(self.step)
            if batch is None:
                logger.info("Stopping on request at step %d", self.step)
                break
            self._train(batch, waited=time.monotonic() - waiting)
            if self.output.due():
                self.output.checkpoint(self._orchestrator_state)
        self.output.checkpoint(self._orchestrator_state)
        self.metrics.close()
        if self._complete():
            logger.log(SUCCESS, "RL trainer finished!")
        return self._complete()

    def _complete(self) -> bool:
        return self.config.max_steps is not None and self.step >= self.config.max_steps

    def _publish(self) -> None:
        self.output.publish(versions=self.config.max_async_level + 2)

    def _train(self, batch: Batch, *, waited: float) -> None:
        step, started = self.step, time.monotonic()
        logger.info("Starting training step %d", step)
        _check(batch, self.learner.policy.model.config.vocab_size)
        samples = [s for s in batch.samples if _gives_gradient(s, self.config.loss)]
        sums = self._forward_backward(samples, _divisor(batch.samples, self.config.loss))
        tokens = sum(len(s.token_ids) for s in batch.samples)
        update = self.learner.update(sums["loss"], tokens=tokens, samples=len(batch.samples))
        self._orchestrator_state = batch.orchestrator_state
        self._publish()
        if self.ranks.first:
            remove_batch(self.inbox.root, step)
        seconds = time.monotonic() - started
        values = {
            **_averages(sums),
            **_staleness(batch),
            "samples": len(batch.samples),
            **update.values(),
            "seconds": seconds,
            "wait_seconds": waited,
            **self.learner.speed(tokens, [len(s.token_ids) for s in samples], seconds),
        }
        self._report(step, values)

    def _forward_backward(self, samples: Sequence[Sample], divisor: float) -> dict[str, float]:
        """Accumulate this rank's share of the gradient; returns all ranks' loss and sums of statistics."""
        logger.info("Starting forward and backward pass (batch_size=%d)", len(samples))
        return self.learner.over_bins(
            [len(s.token_ids) for s in samples],
            self.config.seq_len,
            lambda indices: self._train_bin([samples[i] for i in indices], divisor),
            _SUMS,
        )

    def _train_bin(self, samples: Sequence[Sample], divisor: float) -> dict[str, float]:
        policy = self.learner.policy
        row = make_row([s.token_ids for s in samples], [s.loss_mask for s in samples], policy.device)
        hidden = policy.hidden_states(row.token_ids, row.lengths).index_select(0, row.sources)
        temperatures = torch.tensor([s.temperature for s in samples], device=policy.device)[row.sequences]
        logprobs, entropies = token_logprobs(hidden, policy.head_weight, row.targets, temperatures)
        sums = _loss(logprobs, row, samples, self.config.loss)
        loss = sums.loss / divisor
        loss.backward()
        return {
            "loss": loss.item(),
            "entropy": entropies.detach().sum().item(),
            "mismatch_kl": sums.mismatch_kl.item(),
            "masked_low": sums.masked_low.item(),
            "masked_high": sums.masked_high.item(),
            "masked_sequence": sums.masked_sequence.item(),
            "trained_tokens": len(row.targets),
        }

    def _report(self, step: int, values: Mapping[str, float]) -> None:
        logger.log(SUCCESS, format_step(step, values))
        if self.ranks.first:
            self.metrics.write("trainer", step, finite_only(values))


def _loss(logprobs: Tensor, row: Row, samples: Sequence[Sample], config: LossConfig) -> LossSums:
    def column(name: str) -> Tensor:
        values = np.concatenate([getattr(s, name)[s.loss_mask] for s in samples])
        return torch.from_numpy(values).to(logprobs.device)

    inputs = (logprobs, column("logprobs"), column("advantages"), row.sequences)
    limits = RatioLimits(
        low=config.mask_ratio_low, high=config.mask_ratio_high, sequence_low=config.sequence_mask_ratio_low
    )
    if config.ratio_type == "token":
        return token_ratio_loss(*inputs, limits=limits, kl_tau=config.kl_tau, kl_mask=config.kl_mask_type)
    return sequence_ratio_loss(
        *inputs,
        limits=limits,
        kl_tau=config.kl_tau,
        kl_mask=config.kl_mask_type,
        length_norm=config.ratio_length_norm,
    )


def _gives_gradient(sample: Sample, config: LossConfig) -> bool:
    """Whether a sample can move the weights. One without advantage and without a KL term cannot: its forward
    pass is saved, and the statistics of the step are over the other samples."""
    trained = sample.loss_mask
    return bool(trained.any() if config.kl_tau else sample.advantages[trained].any())


def _divisor(samples: Sequence[Sample], config: LossConfig) -> float:
    """What the batch's loss is divided by: all trained tokens, or for the sequence ratio all sequences."""
    trained = [int(s.loss_mask.sum()) for s in samples]
    return float(max(1, sum(trained) if config.ratio_type == "token" else sum(map(bool, trained))))


def _averages(sums: Mapping[str, float]) -> dict[str, float]:
    """Loss as it is, statistics per trained token; without trained tokens there are no statistics."""
    tokens = sums["trained_tokens"]
    means = {name: sums[name] / tokens for name in _TOKEN_SUMS} if tokens else {}
    return {"loss": sums["loss"], **means, "trained_tokens": tokens}


def _staleness(batch: Batch) -> dict[str, float]:
    """How many versions behind this step the policies were that wrote the tokens."""
    versions = np.concatenate([s.versions[s.loss_mask] for s in batch.samples] or [np.zeros(0, np.int32)])
    if not len(versions):
        return {}
    behind = batch.step - versions
    return {"staleness_mean": float(behind.mean()), "staleness_max": int(behind.max())}


def _check(batch: Batch, vocabulary: int) -> None:
    for index, sample in enumerate(batch.samples):
        if sample.token_ids.min() < 0 or sample.token_ids.max() >= vocabulary:
            raise TransportError(
                f"Sample {index} of batch {batch.step} has token ids outside the model's {vocabulary}: "
                "it was sampled from another model."
            )
        if not sample.temperature > 0:
            raise TransportError(
                f"Sample {index} of batch {batch.step} has temperature {sample.temperature}: greedy "
                "tokens have no log-probability to learn from. Set orchestrator.sampling.temperature above 0."
            )
