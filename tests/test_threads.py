"""Work in threads ends and its results are released, at whichever point its caller is cancelled."""

import asyncio
import threading

import pytest

from buckeye.base.threads import acquire_in_thread, finish_in_thread
from tests.cancelling import cancelled_at


class Resource:
    def __init__(self):
        self.is_open, self.started, self.may_end = False, threading.Event(), threading.Event()

    def open(self):
        self.started.set()
        assert self.may_end.wait(30)
        self.is_open = True
        return self

    def close(self):
        self.is_open = False


async def _cancelled_while_running(resource, work, times):
    task = asyncio.create_task(work)
    await asyncio.to_thread(resource.started.wait)
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done()
    resource.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("times", [1, 3])
def test_a_resource_is_released_if_the_caller_is_cancelled(times):
    resource = Resource()
    work = acquire_in_thread(resource.open, release=Resource.close)
    asyncio.run(_cancelled_while_running(resource, work, times))
    assert not resource.is_open


def test_work_is_finished_if_the_caller_is_cancelled():
    resource = Resource()
    asyncio.run(_cancelled_while_running(resource, finish_in_thread(resource.open), 1))
    assert resource.is_open


def test_work_that_waits_for_a_thread_still_runs_if_the_caller_is_cancelled():
    """`asyncio.to_thread` would drop it, and a folder that it should remove would stay."""
    resource, ran = Resource(), []

    async def scenario():
        loop = asyncio.get_running_loop()
        busy = [loop.run_in_executor(None, resource.open) for _ in range(40)]  # more than there are threads
        task = asyncio.create_task(finish_in_thread(ran.append, 1))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        resource.may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.gather(*busy)

    asyncio.run(scenario())
    assert ran == [1]


def test_an_error_reaches_the_caller():
    def fail():
        raise OSError("full")

    for run in (lambda: finish_in_thread(fail), lambda: acquire_in_thread(fail, release=print)):
        with pytest.raises(OSError, match="full"):
            asyncio.run(run())


def test_nothing_stays_open_after_a_cancellation_at_any_await():
    resource = Resource()
    resource.may_end.set()

    async def work():
        opened = await acquire_in_thread(resource.open, release=Resource.close)
        try:
            await asyncio.sleep(0)
        finally:
            await finish_in_thread(opened.close)

    at = 0
    while asyncio.run(cancelled_at(work, at)):
        assert not resource.is_open
        at += 1
    assert at >= 3
