"""Samples into bins of bounded length, bins onto ranks of equal work."""

from __future__ import annotations

import gc
import heapq
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from buckeye.base.storage import read_json, write_file
from buckeye.config.sft import SFTConfig
from buckeye.config.trainer import TrainerConfig
from buckeye.errors import FinalRunError, RunError, TransportError
from buckeye.trainer.data.prefix_groups import Family, Layout, Tokens, families, plan_row
from buckeye.trainer.parallel.ranks import Ranks

# How many tokens are computed at once: as many as the settings allow, and half of that after every time that
# the memory did not suffice.

logger = logging.getLogger(__name__)

MICRO_BATCH_FILE = "micro_batch.json"
# of errors that torch gives no class
_MESSAGES = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory")


@dataclass(slots=True)
class MicroBatch:
    """`tokens` is the most that are computed at once now, `most` what the settings say. `retries` counts
    how often it was halved in this run. Both survive in `path`, for a restart under the same `conditions`."""

    most: int
    tokens: int
    retries: int
    path: Path
    conditions: Mapping[str, Any]
    divided: bool
    first: bool

    def capacity(self, longest: int) -> int:
        """How long rows may be where the longest sample has so many tokens: it must fit, within `most`."""
        return max(self.tokens, min(longest, self.most))

    def halve(self, computed: int, longest: int, *, device: torch.device) -> None:
        """Compute fewer tokens at once after `computed` were too many; the longest sample has `longest`. When
        it returns, the step can be tried again.

        Raises `FinalRunError` if there is nothing to halve; `RunError` if the model is divided among ranks:
        the others wait for the one that failed in the middle of a pass. The next attempt begins with half.
        """
        if computed <= longest:
            raise FinalRunError(
                f"Out of memory on {device} with {computed} tokens at once, and fewer cannot be: a sample "
                f"has {longest}. Set model.ac to recompute activations, lower seq_len, or give the trainer "
                "more memory; `buckeye rl doctor` shows what it is used for."
            )
        self.tokens = max(longest, computed // 2)
        self.retries += 1
        if self.divided or self.first:
            self._remember()
        if self.divided:
            raise RunError(
                f"Out of memory on {device} with {computed} tokens at once. Ranks that divide a model "
                f"cannot go back one alone: the next attempt computes {self.tokens} at once ({self.path})."
            )
        logger.warning(
            "Out of memory with %d tokens at once: this step is tried again with %d, as are later ones. A "
            "lower seq_len of the trainer (in sft: micro_batch_tokens), or model.ac, would have avoided it",
            computed,
            self.tokens,
        )
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()

    def values(self) -> dict[str, float]:
        """As entries of a step's record."""
        return {"micro_batch_tokens": float(self.tokens), "oom_retries": float(self.retries)}

    def _remember(self) -> None:
        record = {"tokens": self.tokens, "retries": self.retries, "conditions": self.conditions}
        write_file(self.path, json.dumps(record, indent=1))


def micro_batch(config: TrainerConfig | SFTConfig, ranks: Ranks) -> MicroBatch:
    """What the settings say, or what an earlier attempt of the run found possible. All ranks call it."""
    path = config.output_dir / MICRO_BATCH_FILE
    cuda = ranks.device.type == "cuda"
    most = max(config.seq_len, config.micro_batch_tokens) if isinstance(config, SFTConfig) else config.seq_len
    conditions = {
        "seq_len": most,
        "ranks": ranks.count,
        "device": torch.cuda.get_device_name(ranks.device) if cuda else "cpu",
        "optimizer": config.optim.type,
        "model": config.model.model_dump(mode="json"),
    }
    tokens, retries = _remembered(path, conditions) or (most, 0)
    return MicroBatch(
        most=most,
        tokens=-ranks.max(-tokens),
        retries=retries,
        path=path,
        conditions=conditions,
        divided=ranks.mesh is not None,
        first=ranks.first,
    )


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an error of torch says that memory could not be had, on a GPU or in main memory."""
    return isinstance(error, torch.OutOfMemoryError) or any(part in str(error) for part in _MESSAGES)


def _remembered(path: Path, conditions: Mapping[str, Any]) -> tuple[int, int] | None:
    """(tokens, retries) of an earlier attempt; None if there is none, or if it was under other conditions."""
    try:
        record = read_json(path)
        if record["conditions"] != conditions:
            logger.info("%s was written under other settings or on another device: it does not count", path)
            return None
        tokens, retries = int(record["tokens"]), int(record["retries"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s cannot be read (%s): starting with as many as the settings say", path, error)
        return None
    logger.info("%d tokens are computed at once, as %s says, because memory ran out", tokens, path)
    return tokens, retries


# A bin of samples as the tensors that a forward pass and a loss need.


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedMicroBatch:
    """Samples laid out for one forward pass, prefixes that they share once.

    `token_ids` i64[tokens], `position_ids` i64[tokens], and the `layout` that tells attention which tokens
    see each other. `places` i64: where in the row each token of each sample is, sample after sample. For
    each of the N tokens that are trained, sample after sample: `sources` i64[N], the place of the hidden
    state that predicts it; `targets` i64[N], its id; `sequences` i64[N], the number of its sample.
    """

    token_ids: Tensor
    position_ids: Tensor
    layout: Layout
    places: Tensor
    sources: Tensor
    targets: Tensor
    sequences: Tensor


def pack_micro_batch(
    token_ids: Sequence[npt.NDArray[np.int32]],
    loss_masks: Sequence[npt.NDArray[np.bool_]],
    device: torch.device,
    *,
    share: bool = True,
) -> PackedMicroBatch:
    """Lay samples out in a row; without `share`, every one of them whole. `TransportError` if the first token
    of one, which nothing predicts, is to be trained."""
    if any(mask[0] for mask in loss_masks):
        raise TransportError("The loss mask of a sample includes its first token, which nothing predicts.")
    plan = plan_row(token_ids, device, share=share)
    trained = np.flatnonzero(np.concatenate(loss_masks))
    places = np.concatenate(plan.places)
    sequences = np.repeat(np.arange(len(token_ids)), [len(ids) for ids in token_ids])
    tensors = {
        "token_ids": plan.token_ids,
        "position_ids": plan.positions,
        "places": places,
        "sources": places[trained - 1],
        "targets": plan.token_ids[places[trained]],
        "sequences": sequences[trained],
    }
    return PackedMicroBatch(
        layout=plan.layout, **{name: torch.from_numpy(t).to(device) for name, t in tensors.items()}
    )


# Samples into bins of bounded length, bins onto ranks of equal work.


@dataclass(frozen=True, slots=True)
class Bin:
    """Samples that are computed at once: their `indices`, their `tokens` with shared prefixes counted once,
    and an estimated `cost`, in tokens."""

    indices: tuple[int, ...]
    tokens: int
    cost: float


def plan_bins(token_ids: Sequence[Tokens], capacity: int, *, pair_cost: float = 0.0) -> list[Bin]:
    """Samples in bins of at most `capacity` tokens, by first-fit decreasing. Each is in exactly one bin.

    Samples that share a prefix stay together where that fits; otherwise they are split, each part with the
    prefix. FFD needs at most 11/9 of the optimal number of bins plus 6/9 (Dósa 2007). `pair_cost` is what a
    token costs for each token that it sees, relative to all else that it costs. A sample longer than
    `capacity` is a `TransportError`: whoever made the batch should have cut it.
    """
    lengths = [len(ids) for ids in token_ids]
    for index, length in enumerate(lengths):
        if length > capacity:
            raise TransportError(
                f"Sample {index} of the batch has {length} tokens, more than the trainer's seq_len = "
                f"{capacity}. Raise trainer.seq_len, or lower the orchestrator's."
            )
    parts = [part for family in families(token_ids) for part in _split(family, lengths, capacity)]
    tokens = [_tokens(part, lengths) for part in parts]
    return [
        Bin(
            indices=tuple(index for number in numbers for index in parts[number].members),
            tokens=sum(tokens[number] for number in numbers),
            cost=sum(_cost(parts[number], lengths, pair_cost) for number in numbers),
        )
        for numbers in pack(tokens, capacity)
    ]


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices in bins of at most `capacity`, which no length exceeds, by first-fit decreasing."""
    bins: list[list[int]] = []
    free: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        slot = next((i for i, room in enumerate(free) if room >= lengths[index]), None)
        if slot is None:
            bins.append([index])
            free.append(capacity - lengths[index])
        else:
            bins[slot].append(index)
            free[slot] -= lengths[index]
    return bins


def distribute(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Indices of bins for each rank: the costliest bin first, always to the rank with the least work so far.

    The busiest rank gets at most 4/3 of the optimum (Graham 1969). Ranks may get no bin at all.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    load = [(0.0, rank) for rank in range(ranks)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        total, rank = heapq.heappop(load)
        shares[rank].append(index)
        heapq.heappush(load, (total + costs[index], rank))
    return shares


def _split(family: Family, lengths: Sequence[int], capacity: int) -> list[Family]:
    """Parts of a family that fit, each with the prefix."""
    suffixes = [lengths[m] - family.prefix for m in family.members]
    if family.prefix + sum(suffixes) <= capacity:
        return [family]
    packed = pack(suffixes, capacity - family.prefix)
    return [
        Family(tuple(family.members[i] for i in numbers), family.prefix if len(numbers) > 1 else 0)
        for numbers in packed
    ]


def _tokens(family: Family, lengths: Sequence[int]) -> int:
    return family.prefix + sum(lengths[m] - family.prefix for m in family.members)


def _cost(family: Family, lengths: Sequence[int], pair_cost: float) -> float:
    """Tokens, and the pairs of tokens that see each other: half of a square, and beside it the prefix."""
    pairs = (family.prefix**2 + sum(lengths[m] ** 2 - family.prefix**2 for m in family.members)) / 2
    return _tokens(family, lengths) + pair_cost * pairs
