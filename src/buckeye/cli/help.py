"""Print help pages that fit the terminal. Imports only the standard library, so that help is fast."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from textwrap import wrap

from buckeye.base.terminal import has_escape_codes
from buckeye.cli.tree import TITLES, child_commands

Rows = Sequence[tuple[str, str]]

_MIN_COLUMN_WIDTH = 20
_MIN_TEXT_WIDTH = 14
_MIN_WIDTH_FOR_TITLE_COLUMN = 72
_BOLD, _CYAN, _DIM = "1", "36", "2"
_ROOT = "Reinforcement learning for language-model agents."
_FOOTER = "`{program} COMMAND --help` shows the help of a command"
_ROOT_FOOTER = "; --help-all lists all commands; --version; --debug adds tracebacks to errors"


def show_group(group: str, program: str) -> None:
    """Print the page of a command group; "" is the root. `program` is the name that the user typed."""
    width = _width()
    print(_styled(f"usage: {program} COMMAND ...", _BOLD))
    if not group:
        print("\n" + "\n".join(wrap(_ROOT, width)))
    print()
    for line in _group_lines(group, width):
        print(line)
    footer = _FOOTER.format(program=program) + (_ROOT_FOOTER if not group else "")
    print("\n" + _styled("\n".join(wrap(footer, width)), _DIM))


def _group_lines(group: str, width: int) -> Iterator[str]:
    shown = child_commands(group)
    titles = dict(TITLES.get(group, {}))
    listed = {name for names in titles.values() for name in names}
    titles["More" if titles else ""] = tuple(name for name in shown if name not in listed)
    name_width = max(map(len, shown))
    has_title_column = width >= _MIN_WIDTH_FOR_TITLE_COLUMN  # otherwise titles are on their own lines
    title_width = max(map(len, titles)) + 2 if has_title_column and len(titles) > 1 else 2
    text_width = max(_MIN_TEXT_WIDTH, width - title_width - name_width - 2)
    for title, names in titles.items():
        if names and title and not has_title_column:
            yield _styled(title, _BOLD)
        for number, name in enumerate(names):
            head = (title if has_title_column and number == 0 else "").ljust(title_width)
            text = f"\n{' ' * (title_width + name_width + 2)}".join(wrap(shown[name], text_width))
            yield f"{_styled(head, _BOLD)}{_styled(name.ljust(name_width + 2), _CYAN)}{text}"


def show_page(usage: str, text: str, parts: Mapping[str, Rows], footer: str = "") -> None:
    """Print a page on stdout: `usage`, `text`, rows of names and meanings under their titles, and `footer`.

    Titles without rows are left out. Paragraphs are wrapped, except indented ones.
    """
    width = _width()
    for line in usage.splitlines():
        folded = wrap(line, width, subsequent_indent=" " * 9, replace_whitespace=False)
        print(_styled("\n".join(folded), _BOLD))
    _print_paragraphs(text, width)
    for title, rows in parts.items():
        if rows:
            print(_styled("\n" + "\n".join(wrap(title, width)), _BOLD))
            for line in _row_lines(rows, width):
                print(line)
    _print_paragraphs(footer, width)


def _print_paragraphs(text: str, width: int) -> None:
    for paragraph in filter(None, text.strip("\n").split("\n\n")):
        indented = paragraph.startswith(" ")
        folded = paragraph if indented else "\n".join(wrap(" ".join(paragraph.split()), width))
        print(f"\n{folded}")


def _row_lines(rows: Rows, width: int) -> Iterator[str]:
    max_name = width // 2 - 2  # the meaning of a longer name is on the next line
    longest = max((len(name) for name, _ in rows if len(name) <= max_name), default=0)
    left = min(longest + 4, max(width - _MIN_COLUMN_WIDTH, 6))
    for name, meaning in rows:
        padding = left - 2 - len(name)
        gap = " " * padding if padding >= 2 else f"\n{' ' * left}"
        text_width = max(width - left, _MIN_COLUMN_WIDTH)
        text = wrap(meaning, text_width, break_long_words=False, break_on_hyphens=False)
        yield f"{_styled(f'  {name}', _CYAN)}{gap}" + f"\n{' ' * left}".join(text)


def _width() -> int:
    return shutil.get_terminal_size().columns


def _styled(text: str, code: str) -> str:
    """Return `text` in a terminal style if stdout is a terminal, else unchanged."""
    plain = not has_escape_codes(sys.stdout) or os.environ.get("NO_COLOR")
    return text if plain or not text.strip() else f"\x1b[{code}m{text}\x1b[0m"
