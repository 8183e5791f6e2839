"""Where the orchestrator's time goes, and how busy the engines are."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Sequence

from buckeye.inference.client import InferenceClient
from buckeye.monitor.stopwatch import Stopwatch
from buckeye.orchestrator.collected import Collected
from buckeye.orchestrator.rollout import Group
from buckeye.orchestrator.weights_watcher import WeightsWatcher


class LoopTimes:
    """Gathers the times of a step. `stopwatch` has the causes `collect`, `write_batch`, and `evaluate`
    (validation, in lockstep evaluation too, and waiting for the weights that are to be measured)."""

    def __init__(self, client: InferenceClient) -> None:
        self.stopwatch = Stopwatch("collect", "write_batch", "evaluate")
        self._client = client
        self._sampled = 0.0
        self._updating = 0.0

    def record(self, collected: Collected, watcher: WeightsWatcher) -> dict[str, float]:
        """What the step's record says of times: of the loop since the last record by cause, of the engines,
        and of the batch's rollouts. While it collects, the loop waits for rollouts, or for the weights
        without which none may be started. `time/update_weights` goes on beside all else."""
        times = self.stopwatch.take()
        collecting = times.pop("time/collect")
        sampled = sum(replica.tokens for replica in self._client.replicas)
        values = {
            **times,
            "time/wait_for_weights": collected.waited_seconds,
            "time/wait_for_rollouts": max(0.0, collecting - collected.waited_seconds),
            "time/update_weights": watcher.update_seconds - self._updating,
            "sampler/tokens_per_second": (sampled - self._sampled) / max(times["time/total"], 1e-9),
            "sampler/idle_ratio": statistics.fmean(r.busy.take_idle() for r in self._client.replicas),
            **rollout_times(collected.groups),
        }
        self._sampled, self._updating = sampled, watcher.update_seconds
        return values


def rollout_times(groups: Sequence[Group]) -> dict[str, float]:
    """Seconds that rollouts took in the environment and in waiting for sampled tokens (a rollout's mean), and
    that groups lay finished before they were used."""
    rollouts = [r for g in groups for r in g.scored]
    now = time.monotonic()
    ages = [now - max(r.ended for r in g.rollouts) for g in groups]
    return {
        "time/rollout/sampling/mean": statistics.fmean(r.sampling_seconds for r in rollouts),
        "time/rollout/environment/mean": statistics.fmean(r.seconds - r.sampling_seconds for r in rollouts),
        "queue/age_seconds/mean": statistics.fmean(ages),
        "queue/age_seconds/max": max(ages),
    }


class Throughput:
    """Tokens per second over the last steps: rollouts of one step are often played during the one before."""

    def __init__(self, steps: int = 10) -> None:
        self._recent: deque[tuple[int, float]] = deque(maxlen=steps)

    def add(self, tokens: int, seconds: float) -> float:
        self._recent.append((tokens, seconds))
        return sum(t for t, _ in self._recent) / max(sum(s for _, s in self._recent), 1e-9)
