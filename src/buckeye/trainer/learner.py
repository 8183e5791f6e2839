"""What reinforcement learning and supervised fine-tuning share: a policy, its optimizer, its progress and its
throughput."""

from __future__ import annotations

import logging
import math
import resource
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace

import torch

from buckeye.monitor.signals import is_told
from buckeye.trainer.data.packing import PackedMicroBatch
from buckeye.trainer.micro_batch_size import MicroBatchSize
from buckeye.trainer.model.adapter_files import has_adapter
from buckeye.trainer.model.policy import Policy
from buckeye.trainer.optim.optimizer import (
    NamedOptimizer,
    ScheduleType,
    clip_gradients,
    gradient_norm,
    learning_rate,
    sum_gradients,
)
from buckeye.trainer.parallel.fsdp import gather, settle
from buckeye.trainer.parallel.ranks import Ranks

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The arguments of `learning_rate` but the step."""

    schedule: ScheduleType
    peak: float
    warmup: int = 0
    decay: int = 0
    min_lr: float = 0.0
    max_steps: int | None = None

    def at(self, step: int) -> float:
        """The learning rate of an optimizer step, counted from 0."""
        return learning_rate(step, **asdict(self))


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far training is: optimizer steps done, steps of the learning-rate schedule, samples of the data set
    taken since its start, tokens and samples seen, steps left out for a non-finite loss or gradient, steps
    whose gradient was 0."""

    step: int = 0
    schedule_step: int = 0
    data_position: int = 0
    tokens: int = 0
    samples: int = 0
    skipped: int = 0
    empty: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """The result of a step. It was `skipped` if loss or gradient are not finite, and `empty` if the gradient
    is 0; `skipped_steps` and `empty_steps` are how many were so far."""

    skipped: bool
    empty: bool
    grad_norm: float
    lr: float
    skipped_steps: int
    empty_steps: int

    @property
    def applied(self) -> bool:
        """Return True if the optimizer moved the weights."""
        return not (self.skipped or self.empty)

    def values(self) -> dict[str, float]:
        """As entries of a step's record."""
        return {
            "grad_norm": self.grad_norm,
            "lr": self.lr,
            "skipped": int(self.skipped),
            "skipped_steps": self.skipped_steps,
            "empty_steps": self.empty_steps,
        }


class Learner:
    """Turns gradients, which `buckeye.trainer.batch_loss` accumulates, into optimizer steps.
    `buckeye.trainer.output.state` saves and restores it."""

    def __init__(
        self,
        policy: Policy,
        optimizer: NamedOptimizer,
        schedule: Schedule,
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
        self.progress = Progress()
        self.work = Work()
        """What was differentiated since the last `speed`, by all ranks."""
        self.reference_forwards: list[Callable[[PackedMicroBatch, torch.Tensor], torch.Tensor]] = []
        """What else runs a divided model on every row, with temperatures f32[N]."""

    def update(self, loss: float, *, tokens: int, samples: int) -> Update:
        """Sum the gradients over the ranks, clip, step, clear them.

        `loss` is the batch's, over all ranks. A loss or gradient norm that is not finite, or a gradient of 0,
        leaves the weights and the optimizer unchanged: momentum and weight decay would move them although the
        batch teaches nothing. The step counts all the same, as skipped or as empty.
        """
        parameters = self.policy.trainable
        sum_gradients(parameters, self.ranks, dtype=self.reduce_dtype)
        norm = gradient_norm(parameters.values(), self.ranks)
        rate = self.schedule.at(self.progress.schedule_step)
        skipped = not (math.isfinite(loss) and math.isfinite(norm))
        empty = not skipped and norm == 0
        if not (skipped or empty):
            clip_gradients(parameters.values(), norm, self.max_norm)
            self.optimizer.step(rate)
        elif empty and is_told(count := self.progress.empty + 1):
            logger.warning(
                "Step %d has a gradient of 0 (%d such steps so far): no trained token has an advantage, or "
                "the loss masks all that have one. The weights are unchanged.",
                self.progress.step,
                count,
            )
        elif skipped:
            logger.warning(
                "Step %d left out: loss %s, gradient norm %s. The weights are unchanged.",
                self.progress.step,
                loss,
                norm,
            )
        self.clear_gradients()
        done = self.progress
        self.progress = replace(
            done,
            step=done.step + 1,
            schedule_step=done.schedule_step + 1,
            data_position=done.data_position + samples,
            tokens=done.tokens + tokens,
            samples=done.samples + samples,
            skipped=done.skipped + skipped,
            empty=done.empty + empty,
        )
        return Update(
            skipped=skipped,
            empty=empty,
            grad_norm=norm,
            lr=rate,
            skipped_steps=self.progress.skipped,
            empty_steps=self.progress.empty,
        )

    def clear_gradients(self) -> None:
        """Forget what was differentiated."""
        for parameter in self.policy.trainable.values():
            parameter.grad = None

    def speed(self, tokens: int, seconds: float) -> dict[str, float]:
        """The batch's tokens per second; of what was differentiated since the last call `tokens_computed`
        (prefixes that samples share are computed once), all ranks' `gflops_per_second` and, where the
        device's peak is known, `mfu`, a fraction of it; peak memory, and how often it did not suffice."""
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
            values["mfu"] = flops / seconds / (peak * self.ranks.count)
        values["peak_memory_gib"] = peak_memory_gib(self.policy.device)
        return values | self.micro_batch_size.values()

    def model_tensors(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """`stored_tensors` whole, as `dtype`, on the first rank; nothing on the others. All ranks must call
        it."""
        return gather(self.stored_tensors(), keep=self.ranks.first, dtype=dtype)

    def stored_tensors(self) -> Mapping[str, torch.Tensor]:
        """The model's own tensors, or this rank's shards of them. Where an adapter is trained, only its
        own."""
        settle(self.policy)
        model = self.policy.model
        return self.policy.trainable if has_adapter(model) else model.state_dict(keep_vars=True)


def finite_only(values: Mapping[str, float]) -> dict[str, float]:
    """A record without the values that JSON cannot hold."""
    return {name: value for name, value in values.items() if math.isfinite(value)}


def format_step(step: int, values: Mapping[str, float]) -> str:
    """The line of a finished step; quantities without a value are left out."""
    forms = {
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
    parts = [form.format(values[name]) for name, form in forms.items() if name in values]
    return " | ".join([f"Step {step}", *parts])


# Dense bfloat16 FLOP/s without sparsity, from the makers' data sheets, by a part of the device's name.
_PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX A6000": 155e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What went through a model: `tokens`, shared prefixes counted once, and their `cost` in tokens, which
    counts attention too (as `packing.plan_bins` estimates it)."""

    tokens: int = 0
    cost: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(tokens=self.tokens + other.tokens, cost=self.cost + other.cost)


def training_flops(work: Work, matrix_elements: int, *, frozen_elements: int = 0) -> float:
    """Floating-point operations of a forward and backward pass.

    6 per token and element of the matrices that multiply it (`matrix_elements`), 4 for the `frozen_elements`
    among them, whose gradient nobody needs, and for causal attention 12 * layers * heads * head size per pair
    of tokens that see each other (PaLM, arXiv 2204.02311, appendix B, without the masked half of the scores).
    A cost counts the latter in units of the former, so it stands for both.
    """
    return 6.0 * matrix_elements * work.cost - 2.0 * frozen_elements * work.tokens


def peak_flops(device: torch.device) -> float | None:
    """What the device could do per second in bfloat16; None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for part, flops in _PEAK_FLOPS.items() if part in name), None)


def peak_memory_gib(device: torch.device) -> float:
    """The most memory this process has held: on the GPU, or resident where it computes on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20
