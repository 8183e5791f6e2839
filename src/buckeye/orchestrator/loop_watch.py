"""Detection of code that blocks the orchestrator's event loop, and the time metrics of a step."""

from __future__ import annotations

import asyncio
import gc
import logging
import statistics
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from buckeye import inference
from buckeye.base.distribution import CODE_FOLDER
from buckeye.envs.stdlib_only.outcomes import describe_frame, location_of
from buckeye.inference.client import InferenceClient
from buckeye.monitor.metrics import Stopwatch
from buckeye.orchestrator import policy
from buckeye.orchestrator.collected_groups import CollectedGroups
from buckeye.orchestrator.rollout import Group
from buckeye.orchestrator.weights_watcher import WeightsWatcher

log = logging.getLogger(__name__)

SWITCH_SECONDS = 0.0005
"""Time after which a thread that writes a batch must let the event loop run.

The event loop waits for this time at most after every operation on a socket.
"""

# While the code of one rollout computes or sleeps without awaiting, no other rollout can run.
_POLL_SECONDS = 0.05
_BLOCKED_AFTER = 0.2  # seconds without an iteration after which the loop counts as blocked
_WARN_AFTER = 1.0  # total seconds that one code location has blocked the loop before a warning
_OWN_CODE = (CODE_FOLDER, "<frozen ")
_STANDARD_LIBRARY = str(Path(asyncio.__file__).parent.parent)
_SAMPLING_CODE = (str(Path(inference.__file__).parent), policy.__file__)


class LoopWatch:
    """Thread that detects code that blocks an event loop. Call `start` and `stop` in this loop.

    The thread warns once about each code location that has blocked the loop for a second in total.
    """

    def __init__(self) -> None:
        self._last_iteration = 0.0
        self._counted_until = 0.0
        self._blocked_seconds: defaultdict[str, float] = defaultdict(float)
        self._reported: set[str] = set()
        self._ended = threading.Event()
        self._seconds = 0.0
        self._lateness: list[float] = []

    def start(self) -> None:
        """Start the watching thread for the running loop."""
        self._expected = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._native_id = threading.get_native_id()
        self._record_iteration()
        threading.Thread(target=self._watch, name="loop watch", daemon=True).start()

    def stop(self) -> None:
        """Stop watching."""
        self._ended.set()

    def take_seconds(self) -> float:
        """Return the seconds that the loop was blocked since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def take_lateness(self) -> dict[str, float]:
        """Return the metrics of the delays of the loop's timers since the last call."""
        return lateness_metrics("time/loop_late", self.take_delays())

    def take_delays(self) -> list[float]:
        """Return the delays of the timers of the loop since the last call, in seconds."""
        late, self._lateness = self._lateness, []
        return late

    def _record_iteration(self) -> None:
        self._last_iteration = time.monotonic()
        self._lateness.append(max(0.0, self._last_iteration - self._expected))
        self._expected = self._last_iteration + _POLL_SECONDS
        if not self._ended.is_set():
            self._loop.call_later(_POLL_SECONDS, self._record_iteration)

    def _watch(self) -> None:
        iteration = queued = 0.0
        while not self._ended.wait(_POLL_SECONDS):
            now = time.monotonic()
            if self._last_iteration != iteration:
                iteration, queued = self._last_iteration, self._queued_seconds()
            if now - iteration > _BLOCKED_AFTER:
                seconds, before = now - max(iteration, self._counted_until), queued
                self._counted_until, queued = now, self._queued_seconds()
                self._seconds += seconds
                self._attribute(seconds - (queued - before))

    def _queued_seconds(self) -> float:
        """Return the seconds that the loop's thread has waited for a CPU; 0 if the system does not count it.

        No code in the loop is responsible for this time.
        """
        with suppress(OSError, ValueError, IndexError):
            counted = Path(f"/proc/self/task/{self._native_id}/schedstat").read_text()
            return int(counted.split()[1]) / 1e9
        return 0.0

    def _attribute(self, seconds: float) -> None:
        frame = _current_frame(self._thread_id)
        location = "" if frame is None else _find_blocking_code(frame)
        if not location:
            return
        self._blocked_seconds[location] += seconds
        if self._blocked_seconds[location] >= _WARN_AFTER and location not in self._reported:
            self._reported.add(location)
            log.warning(
                "An environment has blocked all other rollouts for %.1f s in total, in %s. Use `await` there "
                "(asyncio.sleep, asynchronous clients, asyncio.to_thread), or run the environment in its own "
                'processes: isolation = "process" and workers = N in its [[orchestrator.env]]',
                self._blocked_seconds[location],
                location,
            )


def _current_frame(thread_id: int) -> FrameType | None:
    """Return the frame that a thread executes, without a garbage collection meanwhile.

    `sys._current_frames` of Python 3.11 holds a lock, and deadlocks if a collection that begins inside of it
    frees a `threading.local`, which needs this lock.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(thread_id)
    finally:
        if was_enabled:
            gc.enable()


def lateness_metrics(name: str, delays: Sequence[float]) -> dict[str, float]:
    """Return the median, the 99th percentile and the maximum of delays."""
    late, shares = sorted(delays) or [0.0], {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {f"{name}/{part}": late[int(share * (len(late) - 1))] for part, share in shares.items()}


def _find_blocking_code(frame: FrameType) -> str:
    """Return the location of the blocking code; "" for Buckeye's own code, such as prompt rendering.

    Functions of the standard library belong to the code that calls them.
    """
    frames = list[str]()
    at: FrameType | None = frame
    # the event loop calls all code from `asyncio.events`
    while at is not None and at.f_code.co_filename != asyncio.events.__file__:
        if at.f_code.co_filename.startswith(_SAMPLING_CODE):
            return ""
        if not _is_own_code(at.f_code.co_filename):
            frames.insert(0, describe_frame(at.f_code.co_filename, at.f_lineno, at.f_code.co_name))
        at = at.f_back
    return location_of(frames).strip(" ()")


def _is_own_code(file: str) -> bool:
    return file.startswith(_OWN_CODE) or (file.startswith(_STANDARD_LIBRARY) and "-packages" not in file)


class StepTimes:
    """Times of a step, by cause: `collect`, `write_batch`, `evaluate` and `sleep`.

    With deterministic sampling, `evaluate` covers the evaluation and the wait for its weights. Otherwise
    evaluations run concurrently, and `evaluate` is about 0.
    """

    def __init__(self, client: InferenceClient) -> None:
        self.stopwatch = Stopwatch("collect", "write_batch", "evaluate", "sleep")
        self._client = client
        self._sampled = 0.0
        self._updating = self._waking = 0.0

    def record(self, collected: CollectedGroups, watcher: WeightsWatcher) -> dict[str, float]:
        """Return the time metrics since the last call: of the loop, of the engines and of the rollouts.

        While it collects, the loop waits for rollouts. If no group may start, it waits for new weights.
        `time/update_weights` overlaps the other times.
        """
        times = self.stopwatch.take()
        collecting = times.pop("time/collect")
        sampled = self._client.sampled_tokens
        values = {
            **times,
            "time/wait_for_weights": collected.waited_seconds,
            "time/wait_for_rollouts": max(0.0, collecting - collected.waited_seconds),
            "time/update_weights": watcher.update_seconds - self._updating,
            "time/wake_up": self._client.wake_seconds - self._waking,
            "sampler/tokens_per_second": (sampled - self._sampled) / max(times["time/total"], 1e-9),
            "sampler/idle_ratio": statistics.fmean(r.busy_clock.take_idle() for r in self._client.replicas),
            **rollout_times(collected.groups),
        }
        self._sampled, self._updating = sampled, watcher.update_seconds
        self._waking = self._client.wake_seconds
        return values


def rollout_times(groups: Sequence[Group]) -> dict[str, float]:
    """Return the mean seconds per rollout in the environment, in sampling and, of these, in queues."""
    rollouts = [r for g in groups for r in g.scored]
    queued = sum(call.sent - call.asked for r in rollouts for call in r.calls)
    return {
        "time/rollout/sampling/mean": statistics.fmean(r.sampling_seconds for r in rollouts),
        "time/rollout/queued/mean": queued / len(rollouts),
        "time/rollout/environment/mean": statistics.fmean(r.seconds - r.sampling_seconds for r in rollouts),
    }


class Throughput:
    """Tokens per second over several steps, because rollouts of a step often run during the step before."""

    def __init__(self, steps: int = 10) -> None:
        self._recent: deque[tuple[int, float]] = deque(maxlen=steps)

    def add(self, tokens: int, seconds: float) -> float:
        self._recent.append((tokens, seconds))
        return sum(t for t, _ in self._recent) / max(sum(s for _, s in self._recent), 1e-9)
