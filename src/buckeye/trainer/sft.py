"""Supervised fine-tuning (SFT) of a model on chats."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from buckeye.base.process import StopFlag, run_identity
from buckeye.config.sft import SFTConfig
from buckeye.monitor.log import SUCCESS
from buckeye.monitor.metrics import MetricsLog, Stopwatch
from buckeye.monitor.verdicts import training_log_level
from buckeye.trainer.data.chat_data import ChatFile, ChatFormat, ChatSample
from buckeye.trainer.data.packing import pack_micro_batch
from buckeye.trainer.learner import Learner, drop_non_finite, format_step
from buckeye.trainer.micro_batches import run_micro_batches
from buckeye.trainer.model.policy import set_dropout
from buckeye.trainer.output.writer import OutputWriter
from buckeye.trainer.parallel.ranks import write_on_rank_zero
from buckeye.trainer.setup import build_learner, find_resume_checkpoint, trainer_process
from buckeye.transport.checkpoint import read_orchestrator_state

logger = logging.getLogger(__name__)

_SUMS = ("loss", "entropy", "trained_tokens")


def run_sft(config: SFTConfig) -> bool:
    """Train on `config.data` for `max_steps` steps (default: one epoch), or until SIGTERM or SIGINT.

    At the end write a checkpoint, and the model to `<output_dir>/weights/step_<N>`. Return True if all steps
    are done.

    A step trains on `batch_size` conversations. Their order is shuffled anew in each epoch. The loss is the
    mean negative log-prob of all their assistant tokens. Raise `UsageError` for data that cannot be trained
    on.
    """
    stop = StopFlag().install()
    with trainer_process(config, "sft") as ranks:
        chat = ChatFormat(config.model.name)
        data = ChatFile(config.data.path, chat, seed=config.data.seed, seq_len=config.seq_len)
        logger.info("Training data %s: %s", data.path, data.counts)
        validation: list[ChatSample] = []
        if config.data.val_path is not None:
            held_out = ChatFile(config.data.val_path, chat, seed=0, seq_len=config.seq_len)
            logger.info("Validation data %s: %s", held_out.path, held_out.counts)
            validation = held_out.all()
        max_steps = config.max_steps or math.ceil(len(data) / config.batch_size)
        resume = find_resume_checkpoint(config, ranks)
        saved = read_orchestrator_state(resume) if resume is not None else {}
        if resume is not None and config.ckpt is not None and not config.ckpt.skip_dataloader:
            data.require_recorded(saved.get("data"), resume.path)
        learner = build_learner(config, ranks, resume, max_steps=max_steps)
        trainer = SFTTrainer(config, learner, stop, data, validation, max_steps, _recorded_best(saved))
        with trainer.output:
            return trainer.run()


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """Checkpoint with the lowest validation loss."""

    step: int
    val_loss: float


class SFTTrainer:
    """Training loop of `run_sft`."""

    def __init__(
        self,
        config: SFTConfig,
        learner: Learner,
        stop: StopFlag,
        data: ChatFile,
        validation: Sequence[ChatSample],
        max_steps: int,
        best: Best | None,
    ) -> None:
        self.learner = learner
        self.stop = stop
        self.data = data
        self.batch_size = config.batch_size
        self.max_steps = max_steps
        self.validation = validation
        self.val_interval = config.data.val_interval
        self.best = best
        self.metrics = MetricsLog(config.output_dir / "metrics.jsonl")
        self.stopwatch = Stopwatch("data", "compute", "validate", "checkpoint")
        self.output = OutputWriter(config, learner, run_identity(), self.metrics)

    def run(self) -> bool:
        """Train all steps, or until any rank receives a stop request. Return True if all steps are done."""
        logger.info("Starting SFT (max_steps=%d)", self.max_steps)
        if self.step == 0:
            self._validate()
        while not self._complete():
            if self.learner.ranks.max(int(self.stop.requested)):
                logger.info("Stopping on request at step %d", self.step)
                break
            self._train()
            if self._is_validation_due():
                self._validate()
            if self.output.is_due():
                self._checkpoint()
        self._checkpoint()
        self.output.publish(versions=1, durable=True)
        self.output.wait()
        self.metrics.close()
        if self._complete():
            left_out = self.learner.progress.skipped + self.learner.progress.empty
            logger.log(training_log_level(self.step, left_out=left_out), "SFT trainer finished!")
        return self._complete()

    @property
    def step(self) -> int:
        """Number of completed optimizer steps."""
        return self.learner.progress.step

    def _complete(self) -> bool:
        return self.step >= self.max_steps

    def _is_checkpoint_due(self) -> bool:
        """Return True if a checkpoint will be written after the current step."""
        return self.step > 0 and (self.output.is_due() or self._complete())

    def _is_validation_due(self) -> bool:
        at_interval = self.val_interval is not None and self.step % self.val_interval == 0
        return at_interval or self._is_checkpoint_due()

    def _checkpoint(self) -> None:
        best = asdict(self.best) if self.best is not None else None
        state = {"best": best, "data": self.data.identity()}
        with self.stopwatch.of("checkpoint"):
            self.output.checkpoint(state, protected=() if self.best is None else (self.best.step,))

    def _train(self) -> None:
        progress, started = self.learner.progress, time.monotonic()
        with self.stopwatch.of("data"):
            samples = self.data.take(progress.data_position, self.batch_size)
        tokens = sum(len(s.token_ids) for s in samples)
        with self.stopwatch.of("compute"):
            sums = self._run_samples(samples, train=True)
            updates = [self.learner.apply_gradient(sums["loss"])]
            update = self.learner.finish_step(
                updates, tokens=tokens, samples=self.batch_size, conversations=self.batch_size
            )
        seconds = time.monotonic() - started
        values = {
            "loss": sums["loss"],
            "entropy": sums["entropy"] / max(1.0, sums["trained_tokens"]),
            **update,
            "trained_tokens": sums["trained_tokens"],
            "samples": len(samples),
            "epoch": progress.data_position / len(self.data),
            "seconds": seconds,
            **self.learner.throughput(tokens, seconds),
            **self.stopwatch.take(),
        }
        # `update` logs a warning about a skipped step before this line
        logger.log(SUCCESS, format_step(progress.step, values))
        self._record("sft", progress.step, values)

    def _validate(self) -> None:
        """Measure the loss on the validation data, if any, and remember the best checkpoint."""
        if not self.validation:
            return
        with self.stopwatch.of("validate"):
            sums = self._run_samples(self.validation, train=False)
        loss = sums["loss"]
        is_best = math.isfinite(loss) and (self.best is None or loss < self.best.val_loss)
        if is_best and self._is_checkpoint_due():
            self.best = Best(step=self.step, val_loss=loss)
        best = "" if self.best is None else f" | Best: {self.best.val_loss:.4f} at step {self.best.step}"
        level = training_log_level(1, left_out=int(not math.isfinite(loss)))
        logger.log(level, "Validation after %d steps | Loss: %.4f%s", self.step, loss, best)
        values = {"val_loss": loss, "trained_tokens": sums["trained_tokens"], "samples": len(self.validation)}
        self._record("validation", self.step, values)

    def _run_samples(self, samples: Sequence[ChatSample], *, train: bool) -> dict[str, float]:
        """Return the mean loss per trained token, and sums of entropy and trained tokens, over all ranks.

        With `train`, also accumulate this rank's part of the gradient.
        """
        divisor = max(1.0, float(sum(s.loss_mask.sum() for s in samples)))
        set_dropout(self.learner.policy.model, active=train)

        def work(indices: Sequence[int]) -> dict[str, float]:
            return self._backward([samples[i] for i in indices], divisor)

        with torch.set_grad_enabled(train):
            return run_micro_batches(self.learner, [s.token_ids for s in samples], work, _SUMS)

    def _backward(self, samples: Sequence[ChatSample], divisor: float) -> dict[str, float]:
        policy = self.learner.policy
        row = pack_micro_batch([s.token_ids for s in samples], [s.loss_mask for s in samples], policy.device)
        temperatures = torch.ones(len(row.targets), device=policy.device)
        logprobs, entropies = policy(row, temperatures)
        loss = -logprobs.sum() / divisor
        if loss.requires_grad:
            loss.backward()
        return {
            "loss": loss.item(),
            "entropy": entropies.detach().sum().item(),
            "trained_tokens": len(row.targets),
        }

    def _record(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        write_on_rank_zero(
            self.learner.ranks, lambda: self.metrics.write(kind, step, drop_non_finite(values))
        )


def _recorded_best(saved: Mapping[str, Any]) -> Best | None:
    """Return the best checkpoint that is recorded in the state of the checkpoint to resume from."""
    best = saved.get("best")
    return Best(**best) if best is not None else None
