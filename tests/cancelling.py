"""Cancel a coroutine at a chosen await."""

import asyncio
from collections.abc import Generator


class _Counted:
    """Awaitable that cancels its task at await number `at`, and counts the awaits."""

    def __init__(self, work, at):
        self._work, self._at, self.awaits = work, at, 0

    def __await__(self) -> Generator:
        steps, sent = self._work.__await__(), None
        while True:
            try:
                waited_for = steps.send(sent) if sent is None else steps.throw(sent)
            except StopIteration as end:
                return end.value
            if self.awaits == self._at:
                asyncio.current_task().cancel()
            self.awaits += 1
            try:
                sent = None
                yield waited_for
            except BaseException as error:
                sent = error


async def cancelled_at(work, at):
    """Run `work()`, cancelled at its await number `at` (from 0). Return False if it ended before.

    Awaits inside tasks that it starts are not counted.
    """
    counted = _Counted(work(), at)

    async def awaited():
        return await counted

    try:
        await asyncio.create_task(awaited())
    except asyncio.CancelledError:
        return True
    return counted.awaits > at
