"""Forward and backward passes of a step: samples are packed into micro-batches, and divided among ranks.

Every rank plans all micro-batches, and computes its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from buckeye.base import heartbeat
from buckeye.base.faults import fault_point
from buckeye.trainer.data.packing import Bin, distribute, pack_micro_batch, plan_bins
from buckeye.trainer.learner import Learner, Work
from buckeye.trainer.micro_batch_size import is_out_of_memory
from buckeye.trainer.parallel.ranks import Ranks
from buckeye.transport.batch_header import Tokens, UnreadTokens
from buckeye.transport.batches import BatchDamageError

logger = logging.getLogger(__name__)

_OUT_OF_MEMORY = "out of memory"  # key of the number of ranks that ran out of memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Micro-batches of a step, equal on all ranks. `shares` has the indices of the bins of each rank.

    `longest` is the length of the longest sample.
    """

    bins: Sequence[Bin]
    shares: Sequence[Sequence[int]]
    longest: int

    def samples(self, rank: int) -> list[int]:
        """Return the indices of the samples of a data-parallel rank."""
        return [index for number in self.shares[rank] for index in self.bins[number].indices]


def plan_micro_batches(learner: Learner, token_ids: Sequence[Tokens | UnreadTokens]) -> Plan:
    """Pack samples into bins of the current size, and divide the bins among the ranks."""
    longest, ranks = max(map(len, token_ids), default=0), learner.ranks.dp_size
    # with bins of at most this many tokens, every rank has a bin
    rank_share = -(-sum(map(len, token_ids)) // ranks)
    bins = plan_bins(
        token_ids,
        min(learner.micro_batch_size.capacity(longest), max(rank_share, longest)),
        pair_cost=learner.policy.pair_cost,
        padded=learner.policy.padded,
    )
    return Plan(bins=bins, shares=distribute([b.cost for b in bins], ranks), longest=longest)


def read_together(ranks: Ranks, read: Callable[[], None]) -> BatchDamageError | None:
    """Call `read` on all ranks, and return None if no rank found damage.

    Otherwise return the error of this rank. If only another rank has one, return an error that names it.
    """
    error: BatchDamageError | None = None
    try:
        read()
    except BatchDamageError as damage:
        error = damage
    damaged = ranks.max(0 if error is None else ranks.rank + 1)
    if damaged and error is None:
        hint = f"see the log of rank {damaged - 1}"
        error = BatchDamageError(f"trainer rank {damaged - 1} found damage in the batch", hint=hint)
    return error


def run_micro_batches(
    learner: Learner,
    token_ids: Sequence[Tokens | UnreadTokens],
    work: Callable[[Sequence[int]], Mapping[str, float]],
    names: Sequence[str],
    *,
    read: Callable[[Sequence[int]], None] = lambda indices: None,
) -> dict[str, float]:
    """Pack samples into bins, and call `work` with the sample indices of each bin of this rank.

    `work` returns a value for each of the `names`. Return the sums of these values over all bins of all
    ranks. Before, `read` is called with the indices of all samples of this rank. If it raises
    `BatchDamageError`, all ranks raise one.

    All ranks of a sharded model must run equally many forward passes. So a rank with fewer bins runs empty
    rows, without calling `work`. When memory runs out, all ranks clear the gradient and start again with
    smaller bins. Raise `RunError` if bins cannot be smaller, or if the model is sharded.
    """
    size, device, ranks = learner.micro_batch_size, learner.policy.device, learner.ranks
    while True:
        plan = plan_micro_batches(learner, token_ids)
        error = read_together(ranks, partial(read, plan.samples(ranks.dp_rank)))
        if error is not None:
            raise error
        largest = max((b.tokens for b in plan.bins), default=0)
        sums = _run_bins(learner, plan, work, names)
        if sums[_OUT_OF_MEMORY] and ranks.mesh is not None:
            # Raises `RunError`, because a rank of a sharded model cannot retry without the other ranks.
            size.halve(largest, plan.longest, device=device)
        sums = ranks.sum(sums)
        if not sums.pop(_OUT_OF_MEMORY):
            break
        learner.clear_gradients()
        size.halve(largest, plan.longest, device=device)
    if torch.is_grad_enabled():
        learner.work += Work(tokens=sum(b.tokens for b in plan.bins), cost=sum(b.cost for b in plan.bins))
    return sums


def _run_bins(
    learner: Learner,
    plan: Plan,
    work: Callable[[Sequence[int]], Mapping[str, float]],
    names: Sequence[str],
) -> dict[str, float]:
    """Call `work` for each bin of this rank, and sum the results. `_OUT_OF_MEMORY` is 1 if memory ran out."""
    rank_bins = [plan.bins[number] for number in plan.shares[learner.ranks.dp_rank]]
    logger.debug(
        "%d samples in %d bins, %d tokens to compute; %d bins on this rank",
        sum(len(b.indices) for b in plan.bins),
        len(plan.bins),
        sum(b.tokens for b in plan.bins),
        len(rank_bins),
    )
    sums = dict.fromkeys((*names, _OUT_OF_MEMORY), 0.0)
    try:
        with learner.policy.cast_weights():
            for number, rank_bin in enumerate(rank_bins, start=1):
                heartbeat.report(f"computes micro-batch {number} of {len(rank_bins)}")
                fault_point("trainer.oom")
                for name, value in work(rank_bin.indices).items():
                    sums[name] += value
            if learner.ranks.mesh is not None:
                for _ in range(max(map(len, plan.shares)) - len(rank_bins)):
                    _run_empty_pass(learner)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        logger.warning("%s", str(error).partition("\n")[0])
        sums[_OUT_OF_MEMORY] = 1.0
    return sums


def _run_empty_pass(learner: Learner) -> None:
    """Run a forward and a backward pass with a gradient of zero, because the other ranks run one too."""
    row = pack_micro_batch([np.zeros(1, np.int32)], [np.zeros(1, np.bool_)], learner.policy.device)
    temperatures = torch.ones(0, device=learner.policy.device)
    loads = learner.policy.expert_loads
    loads.real = torch.zeros(1, dtype=torch.bool, device=learner.policy.device)
    for reference_forward in learner.reference_forwards:
        reference_forward(row, temperatures)
    logprobs, entropies = learner.policy(row, temperatures)
    zero = logprobs.sum() + entropies.sum()
    if zero.requires_grad:
        zero.backward()
    loads.real = None
