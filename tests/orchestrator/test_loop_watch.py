"""Code that blocks the event loop is found and named."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from buckeye.inference.render.renderer import ChatRenderer
from buckeye.orchestrator import loop_watch
from buckeye.orchestrator.loop_watch import LoopWatch
from buckeye.orchestrator.rollout_runner import RolloutRunner


@pytest.fixture(autouse=True)
def _five_times_as_fast(monkeypatch):
    for name in ("_POLL_SECONDS", "_BLOCKED_AFTER", "_WARN_AFTER"):
        monkeypatch.setattr(loop_watch, name, getattr(loop_watch, name) / 5)


async def play(env, rollout):
    await rollout()


def watched(rollout, times):
    """Return the reports and the blocked seconds of `times` rollouts."""
    told = []

    async def run():
        watch = LoopWatch(play.__code__, lambda *what: told.append(what))
        watch.start()
        for _ in range(times):
            await play(SimpleNamespace(name="slow"), rollout)
            await asyncio.sleep(0.04)
        watch.stop()
        return watch.take_seconds()

    return told, asyncio.run(run())


async def grades():
    await asyncio.sleep(0)
    compiles()


def compiles():
    time.sleep(0.14)


async def grades_in_a_task_of_its_own():
    await asyncio.gather(grades())


async def waits():
    await asyncio.sleep(0.14)


def test_a_function_that_blocks_is_named_once_when_a_second_is_lost():
    told, seconds = watched(grades, 4)
    [(name, place, lost)] = told
    line = compiles.__code__.co_firstlineno + 1
    assert (name, place) == ("slow", f"test_loop_watch.py:{line} in compiles")
    assert 0.2 <= lost <= seconds


def test_blocking_function_in_a_separate_task_is_named():
    [(name, place, _)] = watched(grades_in_a_task_of_its_own, 3)[0]
    assert (name, place.rpartition(" ")[2]) == ("", "compiles")


def test_slow_tokenizer_is_not_attributed_to_the_environment():
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


def test_waiting_for_a_cpu_is_not_attributed_to_the_environment(monkeypatch):
    monkeypatch.setattr(LoopWatch, "_queued_seconds", lambda watch: 0.9 * time.monotonic())
    told, seconds = watched(grades, 4)
    assert (told, seconds > 0.2) == ([], True)


def test_awaiting_does_not_block_the_loop():
    assert watched(waits, 2)[0] == []


def test_run_attempt_has_a_variable_env():
    assert "env" in RolloutRunner._run_attempt.__code__.co_varnames
