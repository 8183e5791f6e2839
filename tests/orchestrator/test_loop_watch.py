"""Code that blocks the event loop is found and named."""

import asyncio
import gc
import subprocess
import sys
import time
import weakref

import pytest

from buckeye.inference.render.renderer import ChatRenderer
from buckeye.orchestrator import coroutines, loop_watch
from buckeye.orchestrator.loop_watch import LoopWatch


@pytest.fixture(autouse=True)
def _five_times_as_fast(monkeypatch):
    for name in ("_POLL_SECONDS", "_BLOCKED_AFTER", "_WARN_AFTER"):
        monkeypatch.setattr(loop_watch, name, getattr(loop_watch, name) / 5)


@pytest.fixture
def watched(caplog):
    """Return a function that returns the warnings and the blocked seconds of `times` rollouts."""

    async def run(rollout, times):
        watch = LoopWatch()
        watch.start()
        for _ in range(times):
            await rollout()
            await asyncio.sleep(0.04)
        watch.stop()
        return watch.take_seconds()

    def watch(rollout, times):
        seconds = asyncio.run(run(rollout, times))
        return [record.args for record in caplog.records if record.name == loop_watch.__name__], seconds

    return watch


async def grades():
    await asyncio.sleep(0)
    compiles()


def compiles():
    time.sleep(0.14)


async def grades_in_a_task_of_its_own():
    await asyncio.gather(grades())


async def waits():
    await asyncio.sleep(0.14)


def test_a_function_that_blocks_is_named_once_when_a_second_is_lost(watched):
    told, seconds = watched(grades, 4)
    [(lost, place)] = told
    line = compiles.__code__.co_firstlineno + 1
    assert place == f"test_loop_watch.py:{line} in compiles"
    assert 0.2 <= lost <= seconds


def test_blocking_function_in_a_separate_task_is_named(watched):
    [(_, place)] = watched(grades_in_a_task_of_its_own, 3)[0]
    assert place.endswith(" in compiles")


def test_slow_tokenizer_is_not_attributed_to_the_environment(watched):
    class Slow:
        def encode(self, text, **settings):
            time.sleep(0.14)
            return [1]

    renderer = object.__new__(ChatRenderer)
    renderer.tokenizer = Slow()

    async def asks():
        await asyncio.sleep(0)
        renderer.encode_prompt("a prompt")

    told, seconds = watched(asks, 3)
    assert (told, seconds > 0.2) == ([], True)


def test_standard_library_alone_is_not_attributed_to_the_environment(watched):
    async def starts_a_process():
        asyncio.get_running_loop().call_soon(subprocess.run, ("sleep", "0.14"))

    told, seconds = watched(starts_a_process, 3)
    assert (told, seconds > 0.2) == ([], True)


def test_waiting_for_a_cpu_is_not_attributed_to_the_environment(watched, monkeypatch):
    monkeypatch.setattr(LoopWatch, "_queued_seconds", lambda watch: 0.9 * time.monotonic())
    told, seconds = watched(grades, 4)
    assert (told, seconds > 0.2) == ([], True)


def test_garbage_collections_while_the_code_is_found_cause_no_deadlock():
    """A collection that frees a `threading.local` inside of `sys._current_frames` is a deadlock in 3.11."""
    script = (
        "import gc, threading\n"
        "from buckeye.orchestrator.loop_watch import _current_frame\n"
        "for _ in range(100):\n"
        "    gc.set_threshold(10**6)\n"
        "    cycle = [threading.local()]\n"
        "    cycle[0].value = 1\n"
        "    cycle.append(cycle)\n"
        "    del cycle\n"
        "    gc.set_threshold(1, 1, 1)\n"
        "    assert _current_frame(threading.get_ident()) is not None\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_awaiting_does_not_block_the_loop(watched):
    assert watched(waits, 2)[0] == []


def test_timers_are_late_while_code_blocks_the_loop():
    async def run():
        watch = LoopWatch()
        watch.start()
        await asyncio.sleep(0.1)
        time.sleep(0.3)
        await asyncio.sleep(0.1)
        watch.stop()
        return watch.take_lateness(), watch.take_lateness()

    late, none = asyncio.run(run())
    assert late["time/loop_late/max"] >= 0.25
    assert late["time/loop_late/p50"] <= late["time/loop_late/p99"] <= late["time/loop_late/max"]
    assert set(none.values()) == {0.0}


def test_old_cyclic_garbage_is_collected_at_intervals_only(monkeypatch):
    monkeypatch.setattr(coroutines, "_GARBAGE_SECONDS", 0.05)
    full, ends = [], weakref.WeakSet()

    class Node:
        def __init__(self):
            self.itself = self
            ends.add(self)

    def count(phase, info):
        full.append(phase == "start" and info["generation"] == 2)

    async def run():
        collecting = asyncio.create_task(coroutines.collect_garbage())
        await asyncio.sleep(0)
        gc.callbacks.append(count)
        kept = [Node() for _ in range(50_000)]  # enough for a full collection by default
        assert not any(full)
        assert len(ends) == len(kept)
        del kept
        while ends:
            await asyncio.sleep(0.01)
        assert any(full)
        collecting.cancel()

    thresholds = gc.get_threshold()
    try:
        asyncio.run(run())
    finally:
        gc.callbacks.remove(count)
        gc.set_threshold(*thresholds)
        gc.unfreeze()
