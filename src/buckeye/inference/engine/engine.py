"""Continuous batching: sequences start and end between decode steps, and weights are replaced there.

One thread owns this state (`run`, `step`). Other threads send functions through one queue, so requests and
weight updates stay in order. The engine empties the queue between two steps, and blocks on it when no
sequence runs.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Literal

import numpy as np
import torch

from buckeye.base import heartbeat
from buckeye.inference.engine.commands import CommandQueue
from buckeye.inference.engine.decoder import Chunk, Decoder, batch_chunks
from buckeye.inference.engine.prefix_cache import CachedPrefix, PrefixCache, RunningPrompts
from buckeye.inference.engine.sampling import SamplingBatch, sample, sampling_batch, uniforms
from buckeye.inference.engine.sequences import RunningSequences, Sequence, record_top_logprobs
from buckeye.inference.engine.weights import Checkpoint, ModelWeights
from buckeye.inference.types import FinishReason

log = logging.getLogger(__name__)

PauseMode = Literal["keep", "wait", "abort"]

# Maximum prompt tokens per prefill before the next decode step, without and with running sequences.
_PREFILL_TOKENS = 8192
_PREFILL_TOKENS_WHILE_DECODING = 1024
_RATE_WINDOW = 1.0


class Engine:
    """Sampling of sequences with a decoder."""

    def __init__(self, decoder: Decoder) -> None:
        cache = decoder.cache
        self.decoder = decoder
        self.version = 0
        self.running = RunningSequences(cache.slots, cache.max_len)
        self.waiting: deque[Sequence] = deque()
        self.counters: Counter[str] = Counter()
        """Counts: prompt_tokens (of admitted prompts), prefill_tokens (computed prompt tokens, recomputed
        ones included), generation_tokens, and finished_<reason>.
        """
        self.tokens_per_second = 0.0
        self.deliver: Callable[[list[Sequence]], None] = notify
        """The engine's thread calls it once per step with the updated sequences."""
        self._commands = CommandQueue()
        self._state: Literal["running", "draining", "paused"] = "running"
        self._drained: list[Future[None]] = []
        self._stale_cache = False
        self._running_prompts = RunningPrompts()
        self._prefix_cache = PrefixCache(range(cache.slots, cache.slots + cache.spare))
        self._partial_prefill: CachedPrefix | None = None
        self._batch: SamplingBatch | None = None
        self._updated: list[Sequence] = []
        self._stopped = False
        self._window_tokens, self._window_seconds = 0, 0.0

    # --- any thread ---

    def submit(self, sequences: Iterable[Sequence]) -> None:
        """Queue sequences together and in order: they are admitted together.

        Each prompt has at least one token and is shorter than the context.
        """
        self._commands.put(partial(self.waiting.extend, tuple(sequences)))

    def abort(self, sequences: Iterable[Sequence]) -> None:
        """End sequences now. Finished ones stay unchanged."""
        self._commands.put(partial(self._abort, tuple(sequences)))

    def pause(self, mode: PauseMode) -> Future[None]:
        """Stop decoding. The future completes when decoding has stopped.

        "keep" freezes the running sequences, "wait" lets them finish without admitting others, "abort" ends
        running and waiting ones. New sequences are queued.
        """
        paused: Future[None] = Future()
        self._commands.put(partial(self._pause, mode, paused))
        return paused

    def resume(self) -> Future[None]:
        """Resume decoding after a pause."""
        return self._commands.call(self._resume)

    def install_weights(self, new: ModelWeights | Checkpoint, version: int) -> Future[None]:
        """Replace the weights between two decode steps.

        Prepared weights are installed at once; a (checked) checkpoint is read first. Tokens sampled
        afterwards have `version`. The keys and values of running sequences are recomputed with the new
        weights. New sequences use no prefix cached from other weights.
        """
        return self._commands.call(partial(self._install_weights, new, version))

    def set_version(self, version: int) -> Future[None]:
        """Set the version of the current weights. Tokens sampled afterwards have it."""
        return self._commands.call(partial(self._set_version, version))

    def ping(self) -> Future[None]:
        """Return a future that completes when the engine's thread handles it: a liveness check."""
        return self._commands.call(lambda: None)

    def stop(self) -> None:
        """Make `run` return after the current step. Safe in a signal handler."""
        self._commands.put(self._stop)

    @property
    def is_paused(self) -> bool:
        """True between a pause and the next resume."""
        return self._state != "running"

    # --- the engine's thread ---

    def run(self) -> None:
        """Serve until `stop`. Unfinished sequences then end as "abort"."""
        while not self._stopped:
            if not self._has_work():
                heartbeat.report("requests", on="orchestrator")
            self.step(block=True)
        self._commands.run_pending(block=False)
        self._abort((*self.running.sequences, *self.waiting))
        self._settle_pause()
        self._flush_updates()

    @torch.inference_mode()
    def step(self, *, block: bool = False) -> bool:
        """Run queued commands, admit waiting sequences, decode one token each.

        Return True if work remains. With `block`, wait for the queue if the engine is idle.
        """
        self._commands.run_pending(block=block and not self._has_work())
        if self._has_work():
            heartbeat.report(f"serves {len(self.running) + len(self.waiting)} requests")
            started = time.perf_counter()
            count = 0
            try:
                self._refresh_stale_cache()
                self._admit()
                count = len(self.running)
                self._decode()
            except torch.AcceleratorError:
                raise  # the GPU rejects all further work of this process: only a new process can serve
            except Exception:  # any other error ends only the affected requests
                log.exception("A decode step failed; aborting %d running sequences", len(self.running))
                self._fail_running("the engine failed in a decode step; see its log")
            self._measure(count, time.perf_counter() - started)
        self._settle_pause()
        self._flush_updates()
        return self._has_work()

    def _has_work(self) -> bool:
        if self._stopped or self._state == "paused":
            return False
        return bool(len(self.running) or (self.waiting and self._state == "running"))

    def _stop(self) -> None:
        self._stopped = True

    # --- admission ---

    def _admit(self) -> None:
        """Admit waiting sequences in order, within the free slots and the prefill budget of a step.

        The last prompt may be computed only in part; its sequence stays first in the queue. Only the first of
        several identical prompts is computed; the others copy its keys and values.
        """
        if self._state != "running":
            return
        budget = _PREFILL_TOKENS_WHILE_DECODING if len(self.running) else _PREFILL_TOKENS
        chunks: list[Chunk] = []
        copies: list[tuple[Sequence, Sequence]] = []
        while self.waiting and self.running.free_slots and budget > 0:
            sequence, slot = self.waiting[0], len(self.running)
            sibling = self._running_prompts.find_same_prompt(sequence.prompt_ids)
            if sibling is not None:
                copies.append((sibling, sequence))
            else:
                end = len(sequence.prompt_ids) - 1
                start = self._reuse_prefix(sequence, slot)
                stop = min(end, start + budget)
                if stop > start:
                    chunks.append(Chunk(slot, torch.tensor(sequence.prompt_ids[start:stop]), start))
                    budget -= stop - start
                if stop < end:
                    self._partial_prefill = CachedPrefix(slot, stop)
                    break
            self._running_prompts.add(sequence)
            self._start(self.waiting.popleft())
        self._prefill(chunks)
        for source, sequence in copies:
            self.decoder.cache.copy(source.slot, sequence.slot, len(sequence.prompt_ids) - 1)

    def _reuse_prefix(self, sequence: Sequence, slot: int) -> int:
        """Move the cached part of the first waiting sequence's prompt into a slot.

        Return its number of positions.
        """
        prefix = self._partial_prefill or self._prefix_cache.take(sequence.prompt_ids)
        self._partial_prefill = None
        if prefix is None:
            return 0
        if prefix.slot != slot:
            self.decoder.cache.copy(prefix.slot, slot, prefix.length)
        return prefix.length

    def _start(self, sequence: Sequence) -> None:
        self.running.add(sequence)
        sequence.version_starts = [(self.version, 0)]
        self.counters["prompt_tokens"] += len(sequence.prompt_ids)
        self._batch = None

    def _prefill(self, chunks: list[Chunk]) -> None:
        for batch in batch_chunks(chunks, _PREFILL_TOKENS):
            self.decoder.prefill(batch)
        self.counters["prefill_tokens"] += sum(len(chunk.token_ids) for chunk in chunks)

    def _refresh_stale_cache(self) -> None:
        """Recompute the keys and values of running sequences after a weight update.

        The last token of a sequence is left out: the next decode step computes it. A shared prompt is
        computed once.
        """
        if not self._stale_cache:
            return
        self._stale_cache = False
        whole: list[Chunk] = []
        rest: list[Chunk] = []
        copies: list[tuple[int, int, int]] = []
        for slot, sequence in enumerate(self.running.sequences):
            sibling = self._running_prompts.find_same_prompt(sequence.prompt_ids)
            length, shared = int(self.running.position[slot]), 0
            if sibling is not None:
                shared = min(len(sequence.prompt_ids), length, int(self.running.position[sibling.slot]))
                copies.append((sibling.slot, slot, shared))
            self._running_prompts.add(sequence)
            if length > shared:
                tokens = torch.from_numpy(self.running.tokens[slot, shared:length])
                (rest if shared else whole).append(Chunk(slot, tokens, shared))
        self._prefill(whole)
        for first, slot, shared in copies:
            self.decoder.cache.copy(first, slot, shared)
        self._prefill(rest)

    # --- decoding ---

    def _decode(self) -> None:
        running = self.running
        count = len(running)
        if not count:
            return
        device = self.decoder.device
        positions = running.position[:count]
        # before the forward pass: GPU copies queue behind earlier work
        random = torch.from_numpy(uniforms(running.stream[:count], positions)).to(device)
        logits = self.decoder.decode(
            torch.from_numpy(running.last_token[:count]).to(device),
            torch.from_numpy(positions).to(device),
            int(positions.max()) + 1,
        )
        if self._batch is None:
            columns = running.temperature[:count], running.top_k[:count], running.top_p[:count]
            self._batch = sampling_batch(*columns, vocab=self.decoder.spec.vocab_size, device=device)
        rows, forbidden_tokens = running.forbidden_tokens()
        if len(rows):
            logits[torch.from_numpy(rows).to(device), torch.from_numpy(forbidden_tokens).to(device)] = float(
                "-inf"
            )
        record_top_logprobs(running.sequences, logits, self._batch)
        tokens, logprobs = sample(logits, self._batch, random)
        ended = running.record(tokens.cpu().numpy(), logprobs.cpu().numpy())
        self.counters["generation_tokens"] += count
        self._update_streams()
        for slot in ended:
            self._end(slot)

    def _update_streams(self) -> None:
        running = self.running
        for sequence in running.sequences:
            if not sequence.streamed:
                continue
            position = running.position[sequence.slot]
            sequence.token_ids.append(int(running.tokens[sequence.slot, position]))
            sequence.logprobs.append(float(running.logprobs[sequence.slot, position]))
            self._updated.append(sequence)

    def _measure(self, tokens: int, seconds: float) -> None:
        self._window_tokens += tokens
        self._window_seconds += seconds
        if self._window_seconds >= _RATE_WINDOW:
            self.tokens_per_second = self._window_tokens / self._window_seconds
            self._window_tokens, self._window_seconds = 0, 0.0

    # --- endings ---

    def _end(self, slot: int) -> None:
        """End a sequence that `RunningSequences.record` reported."""
        running = self.running
        if not np.isfinite(running.logprobs[slot, running.position[slot]]):
            # a later sequence in the slot would read NaN values even under the attention mask: NaN times 0 is
            # NaN
            self.decoder.cache.clear(slot, int(running.position[slot]) + 1)
            error = f"the model (weights version {self.version}) computed logits that are not finite"
            self._finish(slot, "abort", error)
        else:
            self._finish(slot, running.finish_reason(slot))

    def _finish(self, slot: int, reason: FinishReason, error: str | None = None) -> None:
        running = self.running
        sequence = running.sequences[slot]
        if not sequence.streamed:
            sequence.token_ids, sequence.logprobs = running.results(slot)
        self._running_prompts.remove(sequence)
        if error is None and not self._stale_cache:
            self._keep(sequence)
        moved_from = running.remove(slot)
        if moved_from is not None:
            self.decoder.cache.copy(moved_from, slot, int(running.position[slot]))
        self._batch = None
        self._close(sequence, reason, error)

    def _close(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        sequence.error = error
        sequence.finish_reason = reason
        self.counters[f"finished_{reason}"] += 1
        self._updated.append(sequence)

    def _keep(self, sequence: Sequence) -> None:
        """Keep the keys and values of an ending sequence, for prompts that continue it."""
        length = int(self.running.position[sequence.slot])
        spare = self._prefix_cache.keep(tuple(self.running.tokens[sequence.slot, :length].tolist()))
        if spare is not None:
            self.decoder.cache.copy(sequence.slot, spare, length)

    def _clear_prefixes(self) -> None:
        self._running_prompts.clear()
        self._prefix_cache.clear()
        self._partial_prefill = None

    def _abort(self, sequences: tuple[Sequence, ...]) -> None:
        for sequence in sequences:
            if sequence.finish_reason is not None:
                continue
            if sequence.slot >= 0:
                self._finish(sequence.slot, "abort")
            else:
                if sequence is self.waiting[0]:
                    self._partial_prefill = None
                self.waiting.remove(sequence)
                self._close(sequence, "abort")

    def _fail_running(self, error: str) -> None:
        for slot in reversed(range(len(self.running))):
            self._finish(slot, "abort", error)
        if self._partial_prefill is not None:
            self._partial_prefill = None
            self._close(self.waiting.popleft(), "abort", error)

    def _flush_updates(self) -> None:
        if self._updated:
            updated, self._updated = list(dict.fromkeys(self._updated)), []
            self.deliver(updated)

    # --- pauses and weights ---

    def _pause(self, mode: PauseMode, paused: Future[None]) -> None:
        self._drained.append(paused)
        self._state = "draining" if mode == "wait" else "paused"
        if mode == "abort":
            self._abort((*self.running.sequences, *self.waiting))

    def _settle_pause(self) -> None:
        """Complete pending pauses. A draining engine is paused once no sequence runs."""
        if self._state == "draining" and not len(self.running):
            self._state = "paused"
        if self._state != "draining":
            drained, self._drained = self._drained, []
            for done in drained:
                done.set_result(None)

    def _resume(self) -> None:
        self._state = "running"

    def _install_weights(self, new: ModelWeights | Checkpoint, version: int) -> None:
        self._clear_prefixes()
        self._stale_cache = True
        self.decoder.weights.load(new)
        self._set_version(version)

    def _set_version(self, version: int) -> None:
        self.version = version
        for slot, sequence in enumerate(self.running.sequences):
            sampled = int(self.running.position[slot]) + 1 - len(sequence.prompt_ids)
            sequence.version_starts.append((version, sampled))


def notify(sequences: list[Sequence]) -> None:
    """Report an update to the clients of sequences."""
    for sequence in sequences:
        sequence.on_update()
