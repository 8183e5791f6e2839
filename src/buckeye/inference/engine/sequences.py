"""State of the engine: a sequence, and the table of all running sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from buckeye.inference.engine.sampling import SamplingBatch, mix, truncate
from buckeye.inference.types import FinishReason, SamplingParams

_NO_TOKEN = -1


@dataclass(slots=True, eq=False)
class Sequence:
    """Prompt and its sampled continuation.

    The engine sets the fields that follow `on_update`. Other threads may read them after the engine has
    called `on_update`. If `streamed`, `token_ids` and `logprobs` grow with every token. Otherwise the engine
    sets them when the sequence ends.
    """

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    streamed: bool = False
    on_update: Callable[[], None] = lambda: None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    """Per sampled token: the `params.top_logprobs` most likely tokens with their log-probs, best first."""
    version_starts: list[tuple[int, int]] = field(default_factory=list)
    """Pairs (policy version, index of the first token that this version sampled), in order."""
    finish_reason: FinishReason | None = None
    error: str | None = None
    """Error message, if an error of the engine ended the sequence with the reason "abort"."""
    slot: int = -1

    def version_spans(self) -> list[tuple[int, int, int]]:
        """Return (version, start, end): the version sampled the tokens start to end - 1. Omit empty spans."""
        ends = [*(start for _, start in self.version_starts[1:]), len(self.token_ids)]
        # not strict: a sequence that is aborted before its admission has an end but no version
        spans = zip(self.version_starts, ends, strict=False)
        return [(version, start, end) for (version, start), end in spans if end > start]


class RunningSequences:
    """Table of the running sequences. Row i of every array is for the sequence in slot i.

    Rows 0..len-1 are in use. When a row is removed, the last row moves to its place, so the decode step needs
    no list of slots. `tokens` [slots, max_len] holds prompts and sampled tokens, and `logprobs` the log-probs
    of the sampled tokens. `position` is the position of the last token, which the next step feeds to the
    model. A sequence ends when it has `limit` tokens.
    """

    def __init__(self, slots: int, max_len: int) -> None:
        self.slots = slots
        self.max_len = max_len
        self.sequences: list[Sequence] = []
        self.tokens = np.zeros((slots, max_len), np.int32)
        self.logprobs = np.zeros((slots, max_len), np.float32)
        self.last_token = np.zeros(slots, np.int64)
        self.position = np.zeros(slots, np.int64)
        self.limit = np.zeros(slots, np.int64)
        self.stream = np.zeros(slots, np.uint64)
        self.temperature = np.ones(slots, np.float32)
        self.top_p = np.ones(slots, np.float64)
        self.top_k = np.zeros(slots, np.int64)
        self.stop_from = np.zeros(slots, np.int64)
        self.stop_ids = np.full((slots, 1), _NO_TOKEN, np.int64)
        self._rows = np.arange(slots)

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def free_slots(self) -> int:
        """Number of unused slots."""
        return self.slots - len(self.sequences)

    @property
    def usage(self) -> float:
        """Share of all positions that running sequences use."""
        used = int(self.position[: len(self)].sum()) + len(self)
        return used / (self.slots * self.max_len)

    def add(self, sequence: Sequence) -> None:
        """Put a sequence into the next slot. Its prompt must be shorter than `max_len`."""
        slot = len(self.sequences)
        prompt, params = sequence.prompt_ids, sequence.params
        self.sequences.append(sequence)
        sequence.slot = slot
        self.tokens[slot, : len(prompt)] = prompt
        self.last_token[slot] = prompt[-1]
        self.position[slot] = len(prompt) - 1
        self.limit[slot] = min(len(prompt) + params.max_tokens, self.max_len)
        self.stream[slot] = mix(np.array([params.seed & (2**64 - 1)], np.uint64))[0]
        self.temperature[slot] = params.temperature
        self.top_p[slot] = params.top_p
        self.top_k[slot] = params.top_k
        self.stop_from[slot] = len(prompt) + params.min_tokens
        self._set_stop_ids(slot, params.stop_token_ids)

    def remove(self, slot: int) -> int | None:
        """Remove the sequence in `slot`. Return the old slot of the sequence that moved there, or None."""
        self.sequences[slot].slot = -1
        last = len(self.sequences) - 1
        if slot == last:
            self.sequences.pop()
            return None
        self.sequences[slot] = self.sequences.pop()
        self.sequences[slot].slot = slot
        length = int(self.position[last]) + 1
        self.tokens[slot, :length] = self.tokens[last, :length]
        self.logprobs[slot, :length] = self.logprobs[last, :length]
        for column in (
            self.last_token,
            self.position,
            self.limit,
            self.stream,
            self.temperature,
            self.top_p,
            self.top_k,
            self.stop_from,
            self.stop_ids,
        ):
            column[slot] = column[last]
        return last

    def record(self, tokens: npt.NDArray[np.int64], logprobs: npt.NDArray[np.float64]) -> list[int]:
        """Append one sampled token to every sequence.

        Return the slots whose sequences have ended. The highest slot is first, so that removing a sequence
        moves no other ended sequence.
        """
        count = len(self.sequences)
        position = self.position[:count]
        position += 1
        rows = self._rows[:count]
        self.tokens[rows, position] = tokens
        self.logprobs[rows, position] = logprobs
        self.last_token[:count] = tokens
        ended = position + 1 >= self.limit[:count]
        ended |= (self.stop_ids[:count] == tokens[:, None]).any(1)
        ended |= ~np.isfinite(logprobs)
        return ended.nonzero()[0][::-1].tolist() if ended.any() else []

    def results(self, slot: int) -> tuple[list[int], list[float]]:
        """Return the sampled tokens of a sequence and their log-probs."""
        start, end = len(self.sequences[slot].prompt_ids), int(self.position[slot]) + 1
        return self.tokens[slot, start:end].tolist(), self.logprobs[slot, start:end].tolist()

    def finish_reason(self, slot: int) -> FinishReason:
        """Return the finish reason of a sequence that `record` reported."""
        return "stop" if self.last_token[slot] in self.stop_ids[slot] else "length"

    def forbidden_tokens(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return (row, token) pairs of stop tokens of sequences that are shorter than `min_tokens`."""
        count = len(self.sequences)
        early = self.position[:count] + 1 < self.stop_from[:count]
        if not early.any():
            return self._rows[:0], self._rows[:0]
        rows, columns = (early[:, None] & (self.stop_ids[:count] != _NO_TOKEN)).nonzero()
        return rows, self.stop_ids[rows, columns]

    def _set_stop_ids(self, slot: int, stop_ids: tuple[int, ...]) -> None:
        missing = len(stop_ids) - self.stop_ids.shape[1]
        if missing > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, missing)), constant_values=_NO_TOKEN)
        self.stop_ids[slot] = _NO_TOKEN
        self.stop_ids[slot, : len(stop_ids)] = stop_ids


def record_top_logprobs(sequences: list[Sequence], logits: torch.Tensor, batch: SamplingBatch) -> None:
    """Append the most likely tokens to sequences that requested them. Row i of the logits is for slot i."""
    requesting = [sequence for sequence in sequences if sequence.params.top_logprobs]
    if not requesting:
        return
    rows = torch.tensor([sequence.slot for sequence in requesting], device=logits.device)
    count = max(sequence.params.top_logprobs for sequence in requesting)
    tokens, logprobs = (part.tolist() for part in top_tokens(logits, batch, rows, count))
    for sequence, *best in zip(requesting, tokens, logprobs, strict=True):
        sequence.top_logprobs.append(list(zip(*best, strict=True))[: sequence.params.top_logprobs])


def top_tokens(
    logits: torch.Tensor, batch: SamplingBatch, rows: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `count` most likely tokens of the given `rows` of logits, best first.

    `rows` is int64 [R], and `logits` is float32 [B, V].

    Return tokens, int64 [R, count], and their log-probs under the sampling distribution, float64 [R, count].
    A token that cannot be sampled has log-prob -inf.
    """
    logits = logits[rows]
    if batch.inverse_temperature is not None:
        logits.mul_(batch.inverse_temperature[rows])
    weights = logits.sub_(logits.amax(-1, keepdim=True)).exp_()
    if batch.top_k is not None and batch.top_p is not None:
        weights = truncate(weights, batch.top_k[rows], batch.top_p[rows])
    best, tokens = weights.topk(min(count, weights.shape[1]))
    return tokens, best.double().log() - weights.sum(-1, keepdim=True, dtype=torch.float64).log()
