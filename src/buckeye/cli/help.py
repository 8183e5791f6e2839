"""Help pages, no wider than the terminal. Imports only the standard library, so that help is fast."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from textwrap import wrap

from buckeye.cli.tree import TITLES, child_commands

Rows = Sequence[tuple[str, str]]

_NARROWEST_COLUMN = 20
_NARROWEST_TEXT = 14
_TITLES_ALONGSIDE_FROM = 72
_BOLD, _CYAN, _DIM = "1", "36", "2"
_ROOT = "Reinforcement learning for language-model agents that works the first time."
_LAST = "`{program} COMMAND --help` explains one"
_LAST_OF_ROOT = "; --help-all lists all; --debug, --version"


def show_group(group: str, program: str) -> None:
    """Print the page of a command group; "" is the root. `program` is the name that the user typed."""
    width = _width()
    print(_styled(f"usage: {program} COMMAND ...", _BOLD))
    if not group:
        print("\n" + "\n".join(wrap(_ROOT, width)))
    print()
    for line in _group_lines(group, width):
        print(line)
    last = _LAST.format(program=program) + (_LAST_OF_ROOT if not group else ".")
    print("\n" + _styled("\n".join(wrap(last, width)), _DIM))


def _group_lines(group: str, width: int) -> Iterator[str]:
    shown = child_commands(group)
    titles = dict(TITLES.get(group, {}))
    listed = {name for names in titles.values() for name in names}
    titles["More" if titles else ""] = tuple(name for name in shown if name not in listed)
    room = max(map(len, shown))
    alongside = width >= _TITLES_ALONGSIDE_FROM  # otherwise titles are on their own lines
    left = max(map(len, titles)) + 2 if alongside and len(titles) > 1 else 2
    most = max(_NARROWEST_TEXT, width - left - room - 2)
    for title, names in titles.items():
        if names and title and not alongside:
            yield _styled(title, _BOLD)
        for number, name in enumerate(names):
            head = (title if alongside and number == 0 else "").ljust(left)
            text = f"\n{' ' * (left + room + 2)}".join(wrap(shown[name], most))
            yield f"{_styled(head, _BOLD)}{_styled(name.ljust(room + 2), _CYAN)}{text}"


def show_page(usage: str, text: str, parts: Mapping[str, Rows], last: str = "") -> None:
    """Print a page on stdout: `usage`, `text`, rows of names and meanings under their titles, and `last`.

    Titles without rows are left out. Paragraphs are wrapped, except indented ones.
    """
    width = _width()
    for call in usage.splitlines():
        folded = wrap(call, width, subsequent_indent=" " * 9, replace_whitespace=False)
        print(_styled("\n".join(folded), _BOLD))
    _print_paragraphs(text, width)
    for title, rows in parts.items():
        if rows:
            print(_styled("\n" + "\n".join(wrap(title, width)), _BOLD))
            for line in _lines(rows, width):
                print(line)
    _print_paragraphs(last, width)


def _print_paragraphs(text: str, width: int) -> None:
    for paragraph in filter(None, text.strip("\n").split("\n\n")):
        indented = paragraph.startswith(" ")
        folded = paragraph if indented else "\n".join(wrap(" ".join(paragraph.split()), width))
        print(f"\n{folded}")


def _lines(rows: Rows, width: int) -> Iterator[str]:
    widest = width // 2 - 2  # the meaning of a longer name is on the next line
    longest = max((len(name) for name, _ in rows if len(name) <= widest), default=0)
    left = min(longest + 4, max(width - _NARROWEST_COLUMN, 6))
    for name, meaning in rows:
        room = left - 2 - len(name)
        gap = " " * room if room >= 2 else f"\n{' ' * left}"
        most = max(width - left, _NARROWEST_COLUMN)
        text = wrap(meaning, most, break_long_words=False, break_on_hyphens=False)
        yield f"{_styled(f'  {name}', _CYAN)}{gap}" + f"\n{' ' * left}".join(text)


def _width() -> int:
    return shutil.get_terminal_size().columns


def _styled(text: str, code: str) -> str:
    """Return `text` in a terminal style if stdout is a terminal, else unchanged."""
    plain = not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if plain or not text.strip() else f"\x1b[{code}m{text}\x1b[0m"
