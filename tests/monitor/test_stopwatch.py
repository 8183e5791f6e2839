"""Seconds by cause, on a fake clock."""

from __future__ import annotations

import pytest

from buckeye.monitor import metrics
from buckeye.monitor.metrics import BusyClock, Stopwatch


@pytest.fixture
def clock(monkeypatch):
    """Return `clock(seconds)`, which advances the time."""
    now = 100.0

    def advance(seconds):
        nonlocal now
        now += seconds

    monkeypatch.setattr(metrics.time, "monotonic", lambda: now)
    return advance


def test_every_cause_is_in_every_record(clock):
    watch = Stopwatch("wait", "compute", idle="wait")
    with watch.of("wait"):
        clock(1.0)
    with watch.of("compute"):
        clock(2.0)
    with watch.of("wait"):
        clock(2.0)
    clock(3.0)
    assert watch.take() == {"time/wait": 3.0, "time/compute": 2.0, "time/total": 8.0, "idle_ratio": 0.375}
    clock(1.0)
    assert watch.take() == {"time/wait": 0.0, "time/compute": 0.0, "time/total": 1.0, "idle_ratio": 0.0}


def test_a_block_that_fails_is_counted(clock):
    watch = Stopwatch("compute")

    def fail():
        with watch.of("compute"):
            clock(2.0)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert watch.take() == {"time/compute": 2.0, "time/total": 2.0}


def test_overlapping_work_is_busy_once(clock):
    busy = BusyClock()
    clock(1.0)
    with busy:
        clock(1.0)
        with busy:
            clock(1.0)
        clock(1.0)
    assert busy.take_idle() == 0.25
    with busy:
        clock(3.0)
        assert busy.take_idle() == 0.0  # work in progress counts up to now
        clock(1.0)
    clock(1.0)
    assert busy.take_idle() == 0.5
    assert busy.take_idle() == 0.0  # no time has passed
