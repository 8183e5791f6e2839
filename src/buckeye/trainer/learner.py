"""What reinforcement learning and supervised fine-tuning share: a policy, its optimizer, its progress."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from buckeye.errors import CheckpointError
from buckeye.trainer.adapter import ADAPTER_DIRECTORY, has_adapter, save_weights
from buckeye.trainer.distributed import Ranks
from buckeye.trainer.gradients import clip_gradients, gradient_norm, sum_gradients
from buckeye.trainer.layout import Tokens
from buckeye.trainer.model import Policy
from buckeye.trainer.optim import NamedOptimizer, ScheduleType, learning_rate
from buckeye.trainer.packing import distribute, plan_bins
from buckeye.trainer.parallel import gather, settle, shard_like
from buckeye.trainer.perf import Work, peak_flops, peak_memory_gib, training_flops
from buckeye.trainer.rows import Row, make_row

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
    """What an optimizer step did. `applied` is False for one left out, `skipped` is how many were so far."""

    applied: bool
    grad_norm: float
    lr: float
    skipped: int

    def values(self) -> dict[str, float]:
        """As entries of a step's record."""
        return {
            "grad_norm": self.grad_norm,
            "lr": self.lr,
            "skipped": int(not self.applied),
            "skipped_steps": self.skipped,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Captured:
    """A state of the model and its optimizer, as whole tensors in main memory by their names."""

    model: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, torch.Tensor]


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
        reduce_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.policy = policy
        self.optimizer = optimizer
        self.schedule = schedule
        self.ranks = ranks
        self.tokenizer_files = tokenizer_files
        self.max_norm = max_norm
        self.reduce_dtype = reduce_dtype
        self.progress = Progress()
        self._work = Work()
        """What was differentiated since the last `speed`, by all ranks."""
        self.companions: list[Callable[[Row, torch.Tensor], torch.Tensor]] = []
        """What else runs a divided model on every row, with temperatures f32[N]."""

    def over_bins(
        self,
        token_ids: Sequence[Tokens],
        capacity: int,
        work: Callable[[Sequence[int]], Mapping[str, float]],
        names: Sequence[str],
    ) -> dict[str, float]:
        """Pack samples, call `work(indices of a bin)` for each bin of this rank, and return
        the sums of what all calls on all ranks returned under `names`.

        Of a model that is divided among the ranks, one with fewer bins makes up for them with empty rows, for
        which `work` is not called. Nothing is differentiated under `torch.no_grad()`.
        """
        bins = plan_bins(token_ids, capacity, pair_cost=self.policy.pair_cost)
        shares = distribute([b.cost for b in bins], self.ranks.shares)
        mine = shares[self.ranks.share]
        logger.debug(
            "%d samples of %d tokens, of which %d are computed, in %d bins, %d of them here",
            len(token_ids),
            sum(map(len, token_ids)),
            sum(b.tokens for b in bins),
            len(bins),
            len(mine),
        )
        if torch.is_grad_enabled():
            self._work += Work(tokens=sum(b.tokens for b in bins), cost=sum(b.cost for b in bins))
        totals = dict.fromkeys(names, 0.0)
        with self.policy.computing():
            for index in mine:
                for name, value in work(bins[index].indices).items():
                    totals[name] += value
            if self.ranks.mesh is not None:
                for _ in range(max(map(len, shares)) - len(mine)):
                    self._empty_pass()
        return self.ranks.sum(totals)

    def _empty_pass(self) -> None:
        """Take part in the other ranks' forward and backward pass with a gradient of zero."""
        row = make_row([np.zeros(1, np.int32)], [np.zeros(1, np.bool_)], self.policy.device)
        temperatures = torch.ones(0, device=self.policy.device)
        for companion in self.companions:
            companion(row, temperatures)
        logprobs, entropies = self.policy.token_logprobs(row, temperatures)
        nothing = logprobs.sum() + entropies.sum()
        if nothing.requires_grad:
            nothing.backward()

    def update(self, loss: float, *, tokens: int, samples: int) -> Update:
        """Sum the gradients over the ranks, clip, step, clear them.

        `loss` is the batch's, over all ranks. A non-finite loss or gradient norm leaves the weights and the
        optimizer as they are; the step counts all the same, as skipped.
        """
        parameters = self.policy.trainable
        sum_gradients(parameters, self.ranks, dtype=self.reduce_dtype)
        norm = gradient_norm(parameters.values(), self.ranks)
        rate = self.schedule.at(self.progress.schedule_step)
        finite = math.isfinite(loss) and math.isfinite(norm)
        if finite:
            clip_gradients(parameters.values(), norm, self.max_norm)
            self.optimizer.step(rate)
        else:
            logger.warning(
                "Step %d left out: loss %s, gradient norm %s. The weights are unchanged.",
                self.progress.step,
                loss,
                norm,
            )
        for parameter in parameters.values():
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
        return Update(applied=finite, grad_norm=norm, lr=rate, skipped=self.progress.skipped)

    def speed(self, tokens: int, seconds: float) -> dict[str, float]:
        """The batch's tokens per second; of what was differentiated since the last call `tokens_computed`
        (prefixes that samples share are computed once), all ranks' `gflops_per_second` and, where the
        device's peak is known, `mfu`, a fraction of it; and peak memory."""
        policy, work, self._work = self.policy, self._work, Work()
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
        return values

    def model_tensors(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The model's tensors whole, as `dtype`, on the first rank; nothing on the others. Where an adapter
        is trained, only its own. All ranks must call it."""
        settle(self.policy)
        model = self.policy.model
        state = self.policy.trainable if has_adapter(model) else model.state_dict(keep_vars=True)
        return gather(state, keep=self.ranks.first, dtype=dtype)

    def capture(self) -> Captured:
        """What `save` writes, whole, on the first rank. All ranks must call it."""
        return Captured(
            model=self.model_tensors(torch.float32),
            optimizer=gather(self.optimizer.state(), keep=self.ranks.first),
        )

    def save(self, directory: Path, captured: Captured) -> None:
        """Write everything that training goes on from: `model/` (Hugging Face, float32) or `adapter/` (peft),
        `optimizer.safetensors`, `random.safetensors`, `progress.json`. The first rank does."""
        model = self.policy.model
        save_weights(
            model,
            self.tokenizer_files,
            directory / (ADAPTER_DIRECTORY if has_adapter(model) else "model"),
            dtype=torch.float32,
            tensors=captured.model,
        )
        state = {key: value.contiguous() for key, value in captured.optimizer.items()}
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
        """Take over what `save` wrote, but for the model, which `load_policy(directory / "model")` reads. It
        does not matter how many ranks wrote it.

        The arguments start the counts of tokens and samples, the schedule, or the data anew.
        """
        try:
            progress = Progress(**json.loads((directory / "progress.json").read_text(encoding="utf-8")))
            self.optimizer.load_state(self._read_optimizer(directory / "optimizer.safetensors"))
            _set_random_states(load_file(directory / "random.safetensors"), self.policy.device)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CheckpointError(f"The trainer's state in {directory} cannot be read ({error}).") from error
        anew = {
            **({"tokens": 0, "samples": 0, "skipped": 0} if skip_progress else {}),
            **({"schedule_step": 0} if skip_schedule else {}),
            **({"data_position": 0} if skip_data else {}),
        }
        self.progress = replace(progress, **anew)

    def _read_optimizer(self, path: Path) -> dict[str, torch.Tensor]:
        """This rank's part of the optimizer's state, read one tensor at a time."""
        parameters = self.policy.trainable
        with safe_open(path, "pt") as file:
            tensors = ((key, file.get_tensor(key)) for key in file.keys())  # noqa: SIM118, it is no mapping
            return {
                key: shard_like(tensor, parameters.get(key.rpartition("/")[0])) for key, tensor in tensors
            }


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
