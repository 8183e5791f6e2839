"""Supervised fine-tuning on packed chat data."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence

import torch

from buckeye.config.sft import SFTConfig
from buckeye.errors import UsageError
from buckeye.monitor.log import SUCCESS
from buckeye.monitor.metrics import MetricsLog
from buckeye.process import StopFlag, run_identity
from buckeye.trainer.chat_data import ChatFile, ChatSample, load_chat_tokenizer
from buckeye.trainer.head import token_logprobs
from buckeye.trainer.learner import Learner, finite_only, format_step
from buckeye.trainer.output import Output
from buckeye.trainer.rows import make_row
from buckeye.trainer.setup import build_learner, find_resume, trainer_process

logger = logging.getLogger(__name__)

_SUMS = ("loss", "entropy", "trained_tokens")


def run_sft(config: SFTConfig) -> bool:
    """Train on `config.data` for `max_steps` steps (one epoch without), or until SIGTERM or SIGINT; then
    commit a checkpoint and write the model to `<output_dir>/weights/step_<N>`. True if all steps are done.

    A step takes `batch_size` conversations, shuffled anew each epoch; its loss is the mean negative
    log-probability of all their assistant tokens. Raises `UsageError` for data that cannot be trained on.
    """
    stop = StopFlag().install()
    with trainer_process(config, "sft") as ranks:
        tokenizer, stop_tokens = load_chat_tokenizer(config.model.name)
        data = ChatFile(config.data.path, tokenizer, stop_tokens, seed=config.data.seed)
        validation: list[ChatSample] = []
        if config.data.val_path is not None:
            validation = ChatFile(config.data.val_path, tokenizer, stop_tokens, seed=0).all()
        max_steps = config.max_steps or math.ceil(len(data) / config.batch_size)
        learner = build_learner(config, ranks, find_resume(config), max_steps=max_steps)
        return SFTTrainer(config, learner, stop, data, validation, max_steps).run()


class SFTTrainer:
    """The loop of `run_sft`."""

    def __init__(
        self,
        config: SFTConfig,
        learner: Learner,
        stop: StopFlag,
        data: ChatFile,
        validation: Sequence[ChatSample],
        max_steps: int,
    ) -> None:
        self.learner = learner
        self.stop = stop
        self.data = data
        self.seq_len = config.seq_len
        self.batch_size = config.batch_size
        self.max_steps = max_steps
        self.validation = self._fitting(validation)
        self.metrics = MetricsLog(config.output_dir / "metrics.jsonl")
        self.output = Output.of(config, learner, run_identity())

    def run(self) -> bool:
        """Train to the end, or until any rank is asked to stop. True if all steps are done."""
        logger.info("Starting SFT on %d conversations of %s", len(self.data), self.data.path)
        while not self._complete():
            if self.learner.ranks.max(int(self.stop.requested)):
                logger.info("Stopping on request at step %d", self.learner.progress.step)
                break
            self._step()
        self.output.checkpoint({})
        self.output.publish(versions=1)
        self.metrics.close()
        if self._complete():
            logger.log(SUCCESS, "SFT trainer finished!")
        return self._complete()

    def _complete(self) -> bool:
        return self.learner.progress.step >= self.max_steps

    def _step(self) -> None:
        progress, started = self.learner.progress, time.monotonic()
        samples = self._fitting(self.data.take(progress.data_position, self.batch_size))
        sums = self._sums(samples, train=True)
        lengths = [len(s.token_ids) for s in samples]
        update = self.learner.update(sums["loss"], tokens=sum(lengths), samples=self.batch_size)
        seconds = time.monotonic() - started
        values = {
            "loss": sums["loss"],
            "entropy": sums["entropy"] / max(1.0, sums["trained_tokens"]),
            **update.values(),
            "trained_tokens": sums["trained_tokens"],
            "samples": len(samples),
            "seconds": seconds,
            **self.learner.speed(sum(lengths), lengths, seconds),
        }
        if self.validation and (self.output.due() or self._complete()):
            values["val_loss"] = self._sums(self.validation, train=False)["loss"]
        self._report(progress.step, values)
        if self.output.due():
            self.output.checkpoint({})

    def _sums(self, samples: Sequence[ChatSample], *, train: bool) -> dict[str, float]:
        """Loss per trained token of all samples, and sums of statistics, over all ranks; with `train` this
        rank's share of the gradient is accumulated."""
        divisor = max(1.0, float(sum(s.loss_mask.sum() for s in samples)))

        def work(indices: Sequence[int]) -> dict[str, float]:
            with torch.set_grad_enabled(train):
                return self._train_bin([samples[i] for i in indices], divisor)

        return self.learner.over_bins([len(s.token_ids) for s in samples], self.seq_len, work, _SUMS)

    def _train_bin(self, samples: Sequence[ChatSample], divisor: float) -> dict[str, float]:
        policy = self.learner.policy
        row = make_row([s.token_ids for s in samples], [s.loss_mask for s in samples], policy.device)
        hidden = policy.hidden_states(row.token_ids, row.lengths).index_select(0, row.sources)
        temperatures = hidden.new_ones(len(row.targets), dtype=torch.float32)
        logprobs, entropies = token_logprobs(hidden, policy.head_weight, row.targets, temperatures)
        loss = -logprobs.sum() / divisor
        if loss.requires_grad:
            loss.backward()
        return {
            "loss": loss.item(),
            "entropy": entropies.detach().sum().item(),
            "trained_tokens": len(row.targets),
        }

    def _fitting(self, samples: Sequence[ChatSample]) -> list[ChatSample]:
        fitting = [s for s in samples if len(s.token_ids) <= self.seq_len]
        if len(fitting) < len(samples):
            logger.warning(
                "%d of %d samples are longer than seq_len = %d and are left out",
                len(samples) - len(fitting),
                len(samples),
                self.seq_len,
            )
        if samples and not fitting:
            raise UsageError(
                f"Every sample of a batch is longer than seq_len = {self.seq_len}. Raise seq_len."
            )
        return fitting

    def _report(self, step: int, values: Mapping[str, float]) -> None:
        logger.log(SUCCESS, format_step(step, values))
        if self.learner.ranks.first:
            self.metrics.write("sft", step, finite_only(values))
