"""Training state that RL and SFT share: policy, optimizer, learning-rate schedule and progress."""

from __future__ import annotations

import logging
import math
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from buckeye.base.gpu_speeds import gpu_speed
from buckeye.monitor.verdicts import is_power_of_ten
from buckeye.trainer.data.packing import PackedMicroBatch
from buckeye.trainer.micro_batch_size import MicroBatchSize
from buckeye.trainer.model.adapter_files import has_adapter
from buckeye.trainer.model.policy import PolicyNetwork
from buckeye.trainer.optim.optimizer import (
    LearningRateSchedule,
    NamedOptimizer,
    clip_gradients,
    gradient_norm,
    sum_gradients,
)
from buckeye.trainer.parallel.fsdp import reshard_policy
from buckeye.trainer.parallel.ranks import Ranks

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingProgress:
    """Counters of training progress.

    `step` is the number of completed steps, one per batch, and `schedule_step` the position in the
    learning-rate schedule. `data_position` is the position in the file of conversations, if any. `tokens` and
    `samples` count the tokens and samples of all steps. `skipped` counts the steps in which an update was
    skipped because loss or gradient was not finite. `empty` counts the steps in which all updates had a
    gradient of 0.
    """

    step: int = 0
    schedule_step: int = 0
    data_position: int = 0
    tokens: int = 0
    samples: int = 0
    skipped: int = 0
    empty: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """Result of an optimizer update: the loss and the gradient norm before clipping.

    If the update was `skipped` or `empty`, the weights and the optimizer did not change.
    """

    loss: float
    norm: float

    @property
    def skipped(self) -> bool:
        """True if the loss or the norm is not finite."""
        return not (math.isfinite(self.loss) and math.isfinite(self.norm))

    @property
    def empty(self) -> bool:
        """True if the gradient is 0."""
        return not self.skipped and self.norm == 0


class Learner:
    """Policy with its optimizer, learning-rate schedule and progress.

    `buckeye.trainer.batch_loss` accumulates the gradient of an update, and `apply_gradient` applies it. One
    or more updates make a step, which `finish_step` ends.
    `buckeye.trainer.output.state` saves and restores a learner.
    """

    def __init__(
        self,
        policy: PolicyNetwork,
        optimizer: NamedOptimizer,
        schedule: LearningRateSchedule,
        ranks: Ranks,
        tokenizer_files: Mapping[str, bytes],
        micro_batch_size: MicroBatchSize,
        *,
        max_norm: float | None,
        reduce_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.policy = policy
        self.optimizer = optimizer
        self.schedule = schedule
        self.ranks = ranks
        self.tokenizer_files = tokenizer_files
        self.micro_batch_size = micro_batch_size
        self.max_norm = max_norm
        self.reduce_dtype = reduce_dtype
        self.progress = TrainingProgress()
        self.work = Work()
        """Work of all ranks since the last call of `throughput`."""
        self.reference_forwards: list[Callable[[PackedMicroBatch, torch.Tensor], torch.Tensor]] = []
        """Forward passes of the reference model, `(row, temperatures [N])`. If it is sharded, ranks with
        fewer rows run it on empty rows.
        """

    def apply_gradient(self, loss: float) -> Update:
        """Sum the gradient over the ranks, clip it, run the optimizer, and clear the gradient.

        `loss` is the loss of the whole mini-batch over all ranks. A skipped or empty update leaves the
        weights and the optimizer unchanged, because momentum and weight decay must not move the weights
        without a learning signal.
        """
        parameters = self.policy.trainable
        sum_gradients(parameters, self.ranks, dtype=self.reduce_dtype)
        update = Update(loss=loss, norm=gradient_norm(parameters.values(), self.ranks))
        if not (update.skipped or update.empty):
            clip_gradients(parameters.values(), update.norm, self.max_norm)
            self.optimizer.step(self.schedule.at(self.progress.schedule_step))
        self.clear_gradients()
        return update

    def finish_step(
        self, updates: Sequence[Update], *, tokens: int, samples: int, conversations: int = 0
    ) -> dict[str, float]:
        """Count the step, and return its metrics, with the mean of the gradient norms.

        `conversations` is the number of conversations of a data file that the step took.
        The step number also increases if updates were skipped or empty; then log a warning.
        """
        previous = self.progress
        skipped, empty = [u for u in updates if u.skipped], all(u.empty for u in updates)
        for number, update in enumerate(updates, start=1):
            if update.skipped:
                logger.warning(
                    "%s skipped, weights unchanged: loss %s, gradient norm %s",
                    f"Step {previous.step}"
                    if len(updates) == 1
                    else f"Step {previous.step}: update {number} of {len(updates)}",
                    update.loss,
                    update.norm,
                )
        if empty and is_power_of_ten(count := previous.empty + 1):
            logger.warning(
                "Step %d has a gradient of 0 (%d such steps so far), weights unchanged: no trained token has "
                "an advantage, or the loss masks all tokens that have one",
                previous.step,
                count,
            )
        self.progress = replace(
            previous,
            step=previous.step + 1,
            schedule_step=previous.schedule_step + 1,
            data_position=previous.data_position + conversations,
            tokens=previous.tokens + tokens,
            samples=previous.samples + samples,
            skipped=previous.skipped + bool(skipped),
            empty=previous.empty + empty,
        )
        return {
            "grad_norm": sum(u.norm for u in updates) / len(updates),
            "lr": self.schedule.at(previous.schedule_step),
            "skipped": len(skipped),
            "skipped_steps": self.progress.skipped,
            "empty_steps": self.progress.empty,
        }

    def clear_gradients(self) -> None:
        """Set the gradients of all parameters to None."""
        for parameter in self.policy.trainable.values():
            parameter.grad = None

    def throughput(self, tokens: int, seconds: float) -> dict[str, float]:
        """Return the throughput since the last call.

        `tokens_per_second` counts all `tokens` of the batch. `tokens_computed` counts the tokens of a shared
        prefix once. `gflops_per_second` is the sum over all ranks. `mfu` is the fraction of the peak FLOP/s
        of the devices, if the peak is known. Also return the peak memory in GiB, and the values of
        `MicroBatchSize`.
        """
        policy, work, self.work = self.policy, self.work, Work()
        flops = training_flops(work, policy.matrix_elements, frozen_elements=policy.frozen_matrix_elements)
        values = {
            "tokens": float(tokens),
            "tokens_computed": float(work.tokens),
            "tokens_per_second": tokens / seconds,
            "gflops_per_second": flops / seconds / 1e9,
        }
        peak = peak_flops(policy.device)
        if peak is not None:
            values["mfu"] = flops / seconds / (peak * self.ranks.world_size)
        values["peak_memory_gib"] = peak_memory_gib(self.policy.device)
        return values | self.micro_batch_size.values()

    def local_tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the model's tensors, or this rank's shards of them.

        Return only the adapter's tensors if an adapter is trained.
        """
        reshard_policy(self.policy)
        model = self.policy.model
        return self.policy.trainable if has_adapter(model) else model.state_dict(keep_vars=True)


def drop_non_finite(values: Mapping[str, float]) -> dict[str, float]:
    """Return the values without NaN and infinity, which JSON does not support."""
    return {name: value for name, value in values.items() if math.isfinite(value)}


def format_step(step: int, values: Mapping[str, float]) -> str:
    """Return the log line of a completed step, from the metrics that are in `values`."""
    formats = {
        "seconds": "Time: {:.2f}s",
        "loss": "Loss: {:.4f}",
        "entropy": "Entropy: {:.4f}",
        "mismatch_kl": "Mismatch KL: {:.4f}",
        "grad_norm": "Grad. Norm: {:.4f}",
        "lr": "LR: {:.2e}",
        "tokens_per_second": "Throughput: {:.0f} tokens/s",
        "mfu": "MFU: {:.1%}",
        "peak_memory_gib": "Peak Mem.: {:.1f} GiB",
    }
    parts = [text.format(values[name]) for name, text in formats.items() if name in values]
    return " | ".join([f"Step {step}", *parts])


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Work of forward and backward passes.

    `tokens` counts the tokens of a shared prefix once. `cost` also includes attention, in units of a token
    without attention. `packing.plan_bins` estimates the cost.
    """

    tokens: int = 0
    cost: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(tokens=self.tokens + other.tokens, cost=self.cost + other.cost)


def training_flops(work: Work, matrix_elements: int, *, frozen_elements: int = 0) -> float:
    """Return the floating-point operations of a forward and backward pass.

    A token takes 6 operations per element of the matrices that it is multiplied with (`matrix_elements`). An
    element without gradient (`frozen_elements`) takes 4. Causal attention takes 12 * layers * heads * head
    size per pair of tokens (PaLM, arXiv 2204.02311, appendix B, without the masked half of the scores).
    `work.cost` includes attention, in units of a token.
    """
    return 6.0 * matrix_elements * work.cost - 2.0 * frozen_elements * work.tokens


def peak_flops(device: torch.device) -> float | None:
    """Return the device's peak bfloat16 FLOP/s, or None if it is unknown."""
    if device.type != "cuda":
        return None
    speed = gpu_speed(torch.cuda.get_device_name(device))
    return None if speed is None else speed.flops


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak memory of this process in GiB: GPU memory, or resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20
