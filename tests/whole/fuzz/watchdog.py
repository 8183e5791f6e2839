"""Ends a case that takes for ever: by the processor time that it spends, or the time that it sleeps."""

import signal
from contextlib import contextmanager

BUSY_SECONDS = 20.0
ASLEEP_SECONDS = 120.0


class HangError(BaseException):
    """No loader may catch it."""


@contextmanager
def ends():
    """The block ends within the limits, or raises HangError where it is."""

    def stop(number, frame):
        raise HangError(signal.Signals(number).name)

    kinds = (
        (signal.SIGVTALRM, signal.ITIMER_VIRTUAL, BUSY_SECONDS),
        (signal.SIGALRM, signal.ITIMER_REAL, ASLEEP_SECONDS),
    )
    before = [
        (number, signal.signal(number, stop), timer, signal.setitimer(timer, seconds))
        for number, timer, seconds in kinds
    ]
    try:
        yield
    finally:
        for number, handler, timer, (left, interval) in before:
            signal.setitimer(timer, left, interval)
            signal.signal(number, handler)
