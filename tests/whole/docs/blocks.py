"""The blocks of a page, in order."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Block:
    """`file` is the name in the line before the block, as in `` `a.py`: `` and nothing else."""

    language: str
    text: str
    file: str


def blocks(page):
    """The fenced blocks of a page of Markdown."""
    pattern = r"(?:^`([\w./-]+)`:\n\n)?^```(\w+)\n(.*?)^```"
    return [Block(language, text, file) for file, language, text in re.findall(pattern, page, re.S | re.M)]
