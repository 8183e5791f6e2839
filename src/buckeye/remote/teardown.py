"""End a pod: repeat the request until the provider confirms the end."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from buckeye.errors import RemoteError
from buckeye.remote.ledger import Ledger, PodEntry, hours_text
from buckeye.remote.providers.prime import PrimeProvider

_DEADLINE_SECONDS = 600.0
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0
_CHECKS_WITHOUT_ID = 4  # number of checks after an interrupted order, which may still create its pod


def end_pod(
    provider: PrimeProvider,
    ledger: Ledger,
    entry: PodEntry,
    *,
    outcome: str,
    tell: Callable[[str], None],
) -> tuple[PodEntry, bool]:
    """End every pod with the name of the entry, wait until the provider lists none, and record the end.

    Return the record, and True if Ctrl-C was pressed during the wait. The first Ctrl-C only shows a warning.
    The next one stops the wait. Raises RemoteError if the end is not
    confirmed after ten minutes, or if a retry cannot help. The message has the possible cost and the command
    to end the pod.
    """
    interrupted = False
    while True:
        try:
            _end_all(provider, entry, tell)
            return ledger.end(entry, outcome=outcome), interrupted
        except KeyboardInterrupt:
            if interrupted:
                tell(still_running_text(entry))
                raise
            interrupted = True
            tell(
                f"Ending pod {entry.name} first. Press Ctrl-C again to leave it running: it then costs money."
            )


def still_running_text(entry: PodEntry) -> str:
    """Return a message with the possible cost of a pod, and the command to end it."""
    return (
        f"pod {entry.name} ({entry.pod_id or 'id unknown'}) may still run for ${entry.price_per_hour:.2f} an "
        f"hour. End it: buckeye rl pods terminate {entry.name}"
    )


def cost_text(entry: PodEntry, now: float) -> str:
    """Return the outcome and cost of a pod as text: `buckeye-1a2b-3c: finished; 1.25 h, $9.95`."""
    outcome = f"{entry.outcome.rstrip('.')}; " if entry.outcome else ""
    return f"{entry.name}: {outcome}{hours_text(entry.hours(now))}, ${entry.cost(now):.2f}"


def _end_all(provider: PrimeProvider, entry: PodEntry, tell: Callable[[str], None]) -> None:
    """Request the end of all pods of the entry until the provider lists none of them.

    If the provider does not list its pods, request the end of the recorded pod.
    """
    deadline = time.monotonic() + _DEADLINE_SECONDS
    pause = _FIRST_PAUSE
    empty_checks = 0
    failure = told = "the provider still lists the pod"
    while True:
        final = False
        try:
            alive = _alive(provider, entry)
            empty_checks = 0 if alive else empty_checks + 1
            if empty_checks >= (1 if entry.pod_id is not None else _CHECKS_WITHOUT_ID):
                return
        except RemoteError as error:
            failure, final = str(error), error.final
            alive = {entry.pod_id} if entry.pod_id is not None else set()
        try:
            for pod_id in sorted(alive):
                provider.terminate(pod_id)
        except RemoteError as error:
            failure, final = str(error), final or error.final
        if final:
            raise RemoteError(failure, code="BK-POD-TEARDOWN", hint=still_running_text(entry))
        if failure != told:
            tell(f"the end of pod {entry.name} is not confirmed yet; requesting it again: {failure}")
            told = failure
        if time.monotonic() + pause > deadline:
            raise RemoteError(
                f"the end of pod {entry.name} is not confirmed after 10 minutes: {failure}",
                code="BK-POD-TEARDOWN",
                hint=still_running_text(entry),
            )
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _alive(provider: PrimeProvider, entry: PodEntry) -> set[str]:
    """Return the ids of all pods with the name of the entry. A failed order may have created a second pod."""
    ids = {pod.id for pod in provider.pods() if pod.name == entry.name}
    if entry.pod_id is not None and provider.status(entry.pod_id).state != "gone":
        ids.add(entry.pod_id)
    return ids


@contextmanager
def interrupt_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP act like Ctrl-C during the block, so that a pod is ended.

    Under `nohup`, SIGHUP remains ignored. In other threads than the main thread, the function has no effect,
    because Python sets signal handlers only in the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    with restored_handlers(*numbers):
        for number in numbers:
            signal.signal(number, _interrupt)
        yield


@contextmanager
def restored_handlers(*numbers: signal.Signals) -> Iterator[None]:
    """Restore the handlers of signals after the block."""
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    if not callable(signal.getsignal(signal.SIGINT)):  # a shell ignores SIGINT in a process started with `&`
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)
