"""Seconds of a step by cause, from fixed inputs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from buckeye.monitor import metrics
from buckeye.monitor.metrics import BusyClock
from buckeye.monitor.rollouts import SampledCall
from buckeye.orchestrator import loop_watch
from buckeye.orchestrator.collected_groups import CollectedGroups
from buckeye.orchestrator.loop_watch import StepTimes, Throughput

from .made_rollouts import group, rollout


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(seconds=100.0)
    for module in (metrics, loop_watch):
        monkeypatch.setattr(module.time, "monotonic", lambda: now.seconds)
    return now


def _rollout(seconds, sampling, ended, reward=1.0, queued=0.0):
    calls = (SampledCall(0.0, queued, sampling, 5),)
    return rollout(reward, seconds=seconds, sampling_seconds=sampling, end_time=ended, calls=calls)


def test_times_by_cause(clock):
    replicas = [SimpleNamespace(busy_clock=BusyClock()), SimpleNamespace(busy_clock=BusyClock())]
    watcher = SimpleNamespace(update_seconds=2.0)
    client = SimpleNamespace(replicas=replicas, sampled_tokens=0, wake_seconds=0.5)
    times = StepTimes(client)
    with times.stopwatch.of("evaluate"):
        clock.seconds += 1.0
    with times.stopwatch.of("collect"), replicas[0].busy_clock:
        clock.seconds += 6.0
    with times.stopwatch.of("write_batch"):
        clock.seconds += 1.0
    client.sampled_tokens = 80
    groups = [
        group(_rollout(3.0, 1.0, 103.0), _rollout(9.0, 1.0, 104.0, reward=None)),
        group(_rollout(5.0, 4.0, 107.0, queued=3.0), index=1),
    ]
    assert times.record(CollectedGroups(groups=groups, waited_seconds=4.0), watcher) == {
        "time/evaluate": 1.0,
        "time/write_batch": 1.0,
        "time/sleep": 0.0,
        "time/wake_up": 0.5,
        "time/total": 8.0,
        "time/wait_for_weights": 4.0,
        "time/wait_for_rollouts": 2.0,
        "time/update_weights": 2.0,
        "sampler/tokens_per_second": 10.0,
        "sampler/idle_ratio": (0.25 + 1.0) / 2,
        "time/rollout/sampling/mean": 2.5,
        "time/rollout/queued/mean": 1.5,
        "time/rollout/environment/mean": 1.5,
    }
    clock.seconds += 4.0
    client.sampled_tokens += 8
    watcher.update_seconds += 0.5
    second = times.record(CollectedGroups(groups=groups), watcher)
    assert (second["sampler/tokens_per_second"], second["time/update_weights"]) == (2.0, 0.5)
    assert (second["time/wait_for_rollouts"], second["sampler/idle_ratio"]) == (0.0, 1.0)


def test_throughput_is_over_the_last_steps():
    throughput = Throughput(steps=2)
    assert [throughput.add(10, 1.0), throughput.add(10, 4.0), throughput.add(30, 4.0)] == [10.0, 4.0, 5.0]
