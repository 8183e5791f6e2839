"""What reinforcement learning and supervised fine-tuning share: a policy, its optimizer, its progress."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from buckeye.errors import CheckpointError
from buckeye.trainer.distributed import Ranks
from buckeye.trainer.export import save_model
from buckeye.trainer.model import Policy
from buckeye.trainer.optim import NamedOptimizer, ScheduleType, learning_rate
from buckeye.trainer.packing import distribute, pack
from buckeye.trainer.perf import peak_flops, peak_memory_gib, training_flops

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
    taken since its start, tokens and samples seen, steps left out for a non-finite loss or gradient."""

    step: int = 0
    schedule_step: int = 0
    data_position: int = 0
    tokens: int = 0
    samples: int = 0
    skipped: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """What an optimizer step did. `applied` is False for one left out."""

    applied: bool
    grad_norm: float
    lr: float

    def values(self) -> dict[str, float]:
        """As entries of a step's record."""
        return {"grad_norm": self.grad_norm, "lr": self.lr, "skipped": int(not self.applied)}


class Learner:
    """Turns accumulated gradients into optimizer steps, and saves and restores all that they depend on."""

    def __init__(
        self,
        policy: Policy,
        optimizer: NamedOptimizer,
        schedule: Schedule,
        ranks: Ranks,
        tokenizer_files: Mapping[str, bytes],
        *,
        max_norm: float | None,
    ) -> None:
        self.policy = policy
        self.optimizer = optimizer
        self.schedule = schedule
        self.ranks = ranks
        self.tokenizer_files = tokenizer_files
        self.max_norm = max_norm
        self.progress = Progress()

    def over_bins(
        self,
        lengths: Sequence[int],
        capacity: int,
        work: Callable[[Sequence[int]], Mapping[str, float]],
        names: Sequence[str],
    ) -> dict[str, float]:
        """Pack samples of these lengths, call `work(indices of a bin)` for each bin of this rank, and return
        the sums of what all calls on all ranks returned under `names`."""
        bins = pack(lengths, capacity)
        mine = distribute([sum(lengths[i] for i in b) for b in bins], self.ranks.count)[self.ranks.rank]
        logger.debug("%d samples in %d bins, %d of them here", len(lengths), len(bins), len(mine))
        totals = dict.fromkeys(names, 0.0)
        for index in mine:
            for name, value in work(bins[index]).items():
                totals[name] += value
        return self.ranks.sum(totals)

    def update(self, loss: float, *, tokens: int, samples: int) -> Update:
        """Sum the gradients over the ranks, clip, step, clear them.

        `loss` is the batch's, over all ranks. A non-finite loss or gradient norm leaves the weights and the
        optimizer as they are; the step counts all the same, as skipped.
        """
        parameters = list(self.policy.trainable.values())
        self.ranks.sum_gradients(parameters)
        limit = math.inf if self.max_norm is None else self.max_norm
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, limit))
        rate = self.schedule.at(self.progress.schedule_step)
        finite = math.isfinite(loss) and math.isfinite(norm)
        if finite:
            self.optimizer.step(rate)
        else:
            logger.warning(
                "Step %d left out: loss %s, gradient norm %s. The weights are unchanged.",
                self.progress.step,
                loss,
                norm,
            )
        for parameter in parameters:
            parameter.grad = None
        done = self.progress
        self.progress = replace(
            done,
            step=done.step + 1,
            schedule_step=done.schedule_step + 1,
            data_position=done.data_position + samples,
            tokens=done.tokens + tokens,
            samples=done.samples + samples,
            skipped=done.skipped + (not finite),
        )
        return Update(applied=finite, grad_norm=norm, lr=rate)

    def speed(self, tokens: int, computed: Sequence[int], seconds: float) -> dict[str, float]:
        """The batch's tokens per second; `mfu`, a fraction, where the device's peak is known, for the samples
        of the lengths `computed` that went through the model; and peak memory."""
        values = {"tokens": float(tokens), "tokens_per_second": tokens / seconds}
        peak = peak_flops(self.policy.device)
        if peak is not None:
            flops = training_flops(self.policy.model.config, self.policy.matrix_elements, computed)
            values["mfu"] = flops / seconds / (peak * self.ranks.count)
        values["peak_memory_gib"] = peak_memory_gib(self.policy.device)
        return values

    def save(self, directory: Path) -> None:
        """Write everything that training goes on from: `model/` (Hugging Face, float32),
        `optimizer.safetensors`, `random.safetensors`, `progress.json`."""
        save_model(self.policy.model, self.tokenizer_files, directory / "model", dtype=torch.float32)
        state = {key: value.contiguous() for key, value in self.optimizer.state().items()}
        save_file(state, directory / "optimizer.safetensors")
        save_file(_random_states(self.policy.device), directory / "random.safetensors")
        progress = json.dumps(asdict(self.progress))
        (directory / "progress.json").write_text(progress, encoding="utf-8")

    def load(
        self,
        directory: Path,
        *,
        skip_progress: bool = False,
        skip_schedule: bool = False,
        skip_data: bool = False,
    ) -> None:
        """Take over what `save` wrote, but for the model, which `load_policy(directory / "model")` reads.

        The arguments start the counts of tokens and samples, the schedule, or the data anew.
        """
        try:
            progress = Progress(**json.loads((directory / "progress.json").read_text(encoding="utf-8")))
            self.optimizer.load_state(load_file(directory / "optimizer.safetensors"))
            _set_random_states(load_file(directory / "random.safetensors"), self.policy.device)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CheckpointError(f"The trainer's state in {directory} cannot be read ({error}).") from error
        anew = {
            **({"tokens": 0, "samples": 0, "skipped": 0} if skip_progress else {}),
            **({"schedule_step": 0} if skip_schedule else {}),
            **({"data_position": 0} if skip_data else {}),
        }
        self.progress = replace(progress, **anew)


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


def _random_states(device: torch.device) -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _set_random_states(states: Mapping[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
