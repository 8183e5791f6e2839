"""Continuous batching: between two decode steps, sequences start and end, and weights are replaced.

One thread runs the engine (`run`, `step`) and owns its state. Other threads put functions into one queue, so
requests and weight updates stay in order. The engine's thread runs the queued functions between two steps. If
no sequence is active, this thread waits for the queue.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from buckeye.base import heartbeat
from buckeye.base.faults import fault_point
from buckeye.errors import UsageError
from buckeye.inference.engine.commands import CommandQueue
from buckeye.inference.engine.decoder import Chunk, Decoder, batch_chunks
from buckeye.inference.engine.prefix_cache import CachedPrefix, PrefixCache, RunningPrompts
from buckeye.inference.engine.sampling import SamplingBatch, sample, sampling_batch, uniforms
from buckeye.inference.engine.sequences import RunningSequences, Sequence, record_top_logprobs
from buckeye.inference.engine.weights import LoadableWeights
from buckeye.inference.types import FinishReason

if TYPE_CHECKING:  # the import of transformers takes seconds
    from buckeye.inference.engine.general_decoder import TransformersDecoder

log = logging.getLogger(__name__)

PauseMode = Literal["keep", "wait", "abort"]
SleepTag = Literal["weights", "kv_cache"]
"""Memory that a sleeping engine has released, by vLLM's names."""

# Maximum prompt tokens per prefill before the next decode step, without and with running sequences.
_PREFILL_TOKENS = 8192
_PREFILL_TOKENS_WHILE_DECODING = 1024
_RATE_WINDOW = 1.0


class Engine:
    """Sampler of many sequences at a time. Each step of the `decoder` appends one token to every sequence."""

    def __init__(self, decoder: Decoder | TransformersDecoder) -> None:
        cache = decoder.cache
        self.decoder = decoder
        self.version = 0
        self.running = RunningSequences(cache.slots, cache.max_len)
        self.waiting: deque[Sequence] = deque()
        self.counters: Counter[str] = Counter()
        """Counts: prompt_tokens (of admitted prompts), prefill_tokens (tokens whose keys and values a prefill
        computed or recomputed), generation_tokens, and finished_<reason>.
        """
        self.tokens_per_second = 0.0
        self.deliver: Callable[[list[Sequence]], None] = notify
        """Function that the engine's thread calls once per step with the updated sequences."""
        self.released: frozenset[SleepTag] = frozenset() if cache.is_allocated else frozenset({"kv_cache"})
        """Memory that the engine has released. The engine sleeps until all of it is restored."""
        self._commands = CommandQueue()
        self._state: Literal["running", "draining", "paused"] = "paused" if self.released else "running"
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
        """Append sequences to the queue, in order and without others between them.

        Each prompt has at least one token and is shorter than the context.
        """
        self._commands.put(partial(self.waiting.extend, tuple(sequences)))

    def abort(self, sequences: Iterable[Sequence]) -> None:
        """End sequences with the reason "abort". Finished sequences stay unchanged."""
        self._commands.put(partial(self._abort, tuple(sequences)))

    def pause(self, mode: PauseMode) -> Future[None]:
        """Stop decoding. The future completes when decoding has stopped.

        "keep" freezes the running sequences. "wait" decodes the running sequences to their ends, and admits
        no others, unless the engine sleeps. "abort" ends all running and waiting sequences. New sequences
        wait until `resume`.
        """
        paused: Future[None] = Future()
        self._commands.put(partial(self._pause, mode, paused))
        return paused

    def resume(self) -> Future[None]:
        """Resume decoding after a pause."""
        return self._commands.call(self._resume)

    def release(self, *, weights: Literal["keep", "move", "drop"] = "keep") -> Future[None]:
        """Free the KV cache, and move the weights to main memory or drop them. Decoding must be paused.

        Sequences of a pause with "keep" continue after `wake_up`, with recomputed keys and values.
        """
        return self._commands.call(partial(self._release, weights))

    def wake_up(self, tags: Iterable[SleepTag]) -> Future[bool]:
        """Restore released memory. Return True if all memory is restored; decoding then resumes.

        After dropped weights, new weights must be installed before the KV cache is restored.
        """
        return self._commands.call(partial(self._wake_up, frozenset(tags)))

    def install_weights(
        self, new: LoadableWeights, version: int, *, keep_kv_cache: bool = False
    ) -> Future[None]:
        """Replace the weights between two decode steps.

        `new` is the result of `prepare`. If it is a checkpoint, the engine reads it first. Tokens sampled
        afterwards have `version`. The engine removes all cached prefixes, and recomputes the
        keys and values of running sequences with the new weights, unless `keep_kv_cache`.
        """
        return self._commands.call(partial(self._install_weights, new, version, keep_kv_cache))

    def set_version(self, version: int) -> Future[None]:
        """Set the version of the current weights. Tokens sampled afterwards have this version."""
        return self._commands.call(partial(self._set_version, version))

    def ping(self) -> Future[None]:
        """Return a future that the engine's thread completes. A timeout shows that the thread hangs."""
        return self._commands.call(lambda: None)

    def prompt_logprobs(self, token_ids: tuple[int, ...]) -> Future[list[float]]:
        """Return the log-probs of the tokens after the first one, each after the tokens before it.

        They are computed between two decode steps, without temperature.
        """
        return self._commands.call(partial(self._prompt_logprobs, token_ids))

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
            if self.released:
                heartbeat.report("the end of its sleep", on="trainer")
            elif not self._has_work():
                heartbeat.report("requests", on="orchestrator")
            self.step(block=True)
        self._commands.run_pending(block=False)
        self._abort((*self.running.sequences, *self.waiting))
        self._settle_pause()
        self._flush_updates()

    @torch.inference_mode()
    def step(self, *, block: bool = False) -> bool:
        """Run queued commands, admit waiting sequences, and append a token to each running sequence.

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
                raise  # the GPU rejects all further work of this process, so only a new process can serve
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

        If the budget ends within a prompt, its sequence stays first in the queue, and the next step computes
        the rest. A prompt that equals the prompt of a running sequence is not computed: its keys and values
        are copied from that sequence.
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
        """Move the cached prefix of the prompt into `slot`. `sequence` is first in the queue.

        Return the length of the prefix, or 0 if no prefix is cached.
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

        The last token of a sequence is left out, because the next decode step computes its key and value. A
        prompt that several sequences share is computed once.
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
        # Copy before the forward pass is queued: a copy to the GPU waits for all work queued before it.
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
            # Attention multiplies masked values by 0, and NaN times 0 is NaN. So remove NaN values before the
            # next sequence uses this slot.
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
        if moved_from is not None and not self._stale_cache:
            self.decoder.cache.copy(moved_from, slot, int(running.position[slot]))
        self._batch = None
        self._close(sequence, reason, error)

    def _close(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        sequence.error = error
        sequence.finish_reason = reason
        self.counters[f"finished_{reason}"] += 1
        self._updated.append(sequence)

    def _keep(self, sequence: Sequence) -> None:
        """Keep the keys and values of a sequence that ends, for later prompts that begin with its tokens."""
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
        self._state = "draining" if mode == "wait" and not self.released else "paused"
        if mode == "abort":
            self._abort((*self.running.sequences, *self.waiting))

    def _settle_pause(self) -> None:
        """Complete the futures of `pause`. A draining engine becomes paused when no sequence is running."""
        if self._state == "draining" and not len(self.running):
            self._state = "paused"
        if self._state != "draining":
            drained, self._drained = self._drained, []
            for done in drained:
                done.set_result(None)

    def _resume(self) -> None:
        self._require_awake()
        self._state = "running"

    def _require_awake(self) -> None:
        if self.released:
            raise UsageError(
                "the engine sleeps", code="BK-INFERENCE-REQUEST", hint="POST /wake_up first, without tags"
            )

    def _release(self, weights: Literal["keep", "move", "drop"]) -> None:
        if self._state != "paused":
            raise UsageError(
                "only a paused engine can release its memory",
                code="BK-INFERENCE-REQUEST",
                hint="POST /pause first, or POST /sleep",
            )
        fault_point("engine.release")
        self._clear_prefixes()
        self._stale_cache = True
        if weights != "keep":
            self.decoder.weights.release(keep=weights == "move")
            self.released |= {"weights"}
        self.decoder.release_cache()
        self.released |= {"kv_cache"}

    def _wake_up(self, tags: frozenset[SleepTag]) -> bool:
        if "weights" in tags & self.released:
            self.decoder.weights.restore()
            self.released -= {"weights"}
        if "kv_cache" in tags & self.released:
            fault_point("engine.wake_up")
            if not self.decoder.weights.is_loaded:
                raise UsageError(
                    "the weights were dropped by /sleep with level 2",
                    code="BK-INFERENCE-REQUEST",
                    hint='wake up with tags "weights", and load weights, before tags "kv_cache"',
                )
            self.decoder.restore_cache()
            self.released -= {"kv_cache"}
        if not self.released:
            self._resume()
        return not self.released

    def _prompt_logprobs(self, token_ids: tuple[int, ...]) -> list[float]:
        self._require_awake()
        return self.decoder.prompt_logprobs(token_ids)

    def _install_weights(self, new: LoadableWeights, version: int, keep_kv_cache: bool) -> None:
        self._clear_prefixes()
        self._stale_cache |= not keep_kv_cache
        self.decoder.weights.load(new)
        self._set_version(version)

    def _set_version(self, version: int) -> None:
        self.version = version
        for slot, sequence in enumerate(self.running.sequences):
            sampled = int(self.running.position[slot]) + 1 - len(sequence.prompt_ids)
            sequence.version_starts.append((version, sampled))


def notify(sequences: list[Sequence]) -> None:
    """Call `on_update` of every sequence."""
    for sequence in sequences:
        sequence.on_update()
