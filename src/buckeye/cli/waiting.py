"""One changing line on stderr while something takes long."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def status_line(first: str, *, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Gives what replaces the text of the line. Shows nothing where stderr is no terminal, or if `quiet`."""
    if quiet or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status(first) as status:
        yield lambda text: status.update(Text(text))
