"""Code blocks of a page, in order."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Block:
    """Code block; `file` is the name in the line before it, as in `` `a.py`: `` and nothing else."""

    language: str
    text: str
    file: str


def blocks(page):
    """Return the fenced blocks of a Markdown page."""
    pattern = r"(?:^`([\w./-]+)`:\n\n)?^```(\w+)\n(.*?)^```"
    return [Block(language, text, file) for file, language, text in re.findall(pattern, page, re.S | re.M)]
