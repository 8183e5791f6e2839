"""Ask the user at a terminal, and show a status line."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import TextIO

FIRST_LINE, RAREST_LINE = 5.0, 60.0
"""Pauses in seconds between the lines that `status_line` prints if stderr is not a terminal.

`FIRST_LINE` is the pause before the first line. Each pause is twice the previous pause, up to `RAREST_LINE`.
"""

_MAX_LINES = 200
_MIN_WIDTH = 40


def has_escape_codes(stream: TextIO) -> bool:
    """Return True if a stream is a terminal that understands escape codes."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def can_prompt(*, yes: bool, as_json: bool) -> bool:
    """Return True if the command may ask the user: at a terminal, without `--yes` and `--json`."""
    return not yes and not as_json and sys.stdin.isatty() and sys.stdout.isatty()


def choose(title: str, options: Sequence[tuple[str, str]]) -> str:
    """Show numbered options, each a value and a note, and return the value of the chosen option.

    An empty answer chooses the first option.
    """
    print(f"\n{title}")
    width = max(shutil.get_terminal_size().columns, _MIN_WIDTH)
    for number, (value, note) in enumerate(options, 1):
        line = f"  {number}  {value}{f'  ({note})' if note else ''}"
        print(textwrap.fill(line, width, subsequent_indent=" " * 7, break_long_words=False))
    while True:
        answer = _read_line("Number or name [1]: ")
        if not answer:
            return options[0][0]
        if answer.isdecimal() and 1 <= int(answer) <= len(options):
            return options[int(answer) - 1][0]
        if answer in [value for value, _ in options]:
            return answer
        print(f"No option {answer}: enter a number from 1 to {len(options)}.")


def prompt_for_text(title: str) -> str:
    """Ask the user for a line of text, and return it. The line may be empty."""
    return _read_line(f"\n{title}: ")


def confirm(question: str) -> bool:
    """Ask the user a question, and return True for yes. An empty answer means yes."""
    while True:
        answer = _read_line(f"{question} [Y/n]: ").lower()
        if answer in ("", "y", "yes"):
            return True
        if answer in ("n", "no"):
            return False
        print("Enter y or n.")


def show_file(path: Path, text: str) -> None:
    """Print the content of a file that will be written."""
    lines = text.splitlines()
    print(f"\n--- {path} ---")
    for line in lines[:_MAX_LINES]:
        print(f"  {line}")
    if len(lines) > _MAX_LINES:
        print(f"  ... and {len(lines) - _MAX_LINES} more lines")
    print("---")


def _read_line(prompt: str) -> str:
    """Return the line that the user types. The end of the input counts as Ctrl-C."""
    try:
        return input(prompt).strip()
    except EOFError:
        print()
        raise KeyboardInterrupt from None


@contextmanager
def stdout_kept(*, for_json: bool) -> Iterator[None]:
    """Send to stderr what environments and reward functions print in the block, if stdout is `for_json`."""
    with redirect_stdout(sys.stderr) if for_json else nullcontext():
        yield


@contextmanager
def status_line(first: str, *, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Show a status line during the block, and yield a function that changes its text.

    If stderr is not a terminal, the newest text is printed from time to time, as a plain line and only if it
    has changed. With `quiet`, no text is shown.
    """
    if quiet:
        yield lambda _: None
        return
    if not sys.stderr.isatty():
        with _print_periodically(first) as show:
            yield show
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status(first) as status:
        yield lambda text: status.update(Text(text))


@contextmanager
def _print_periodically(first: str) -> Iterator[Callable[[str], None]]:
    newest, stopped, stream = [first], threading.Event(), sys.stderr

    def print_newest() -> None:
        pause, printed = FIRST_LINE, ""
        while not stopped.wait(pause):
            if newest[0] != printed:
                printed = newest[0]
                print(f"{printed} ...", file=stream, flush=True)
            pause = min(2 * pause, RAREST_LINE)

    thread = threading.Thread(target=print_newest, daemon=True)
    thread.start()
    try:
        yield lambda text: newest.__setitem__(0, text)
    finally:
        stopped.set()
        thread.join()
