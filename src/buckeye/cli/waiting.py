"""What is being done, on stderr, while something takes long."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FIRST_LINE, RAREST_LINE = 5.0, 60.0
"""Seconds before the first line where stderr is no terminal, and at most between two: each pause is twice as
long as the one before."""


@contextmanager
def status_line(first: str, *, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Gives what replaces the text of one changing line; where stderr is no terminal, the text that a plain
    line shows now and then. Shows nothing if `quiet`."""
    if quiet:
        yield lambda _: None
        return
    if not sys.stderr.isatty():
        with _now_and_then(first) as show:
            yield show
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status(first) as status:
        yield lambda text: status.update(Text(text))


@contextmanager
def _now_and_then(first: str) -> Iterator[Callable[[str], None]]:
    newest, over, stream = [first], threading.Event(), sys.stderr

    def tell() -> None:
        pause = FIRST_LINE
        while not over.wait(pause):
            print(f"{newest[0]} ...", file=stream, flush=True)
            pause = min(2 * pause, RAREST_LINE)

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield lambda text: newest.__setitem__(0, text)
    finally:
        over.set()
        thread.join()
