"""Read the explanations of error codes and findings from `explanations.md`."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources

_HEADING = re.compile(r"^## (.+)$", re.M)
_PART = re.compile(r"^# .+", re.M)


@cache
def explanations() -> dict[str, str]:
    """Return the text about each error code and finding, by its name and in the order of the file."""
    text = resources.files("buckeye").joinpath("explanations.md").read_text(encoding="utf-8")
    pieces = _HEADING.split(text)[1:]
    sections = zip(pieces[::2], pieces[1::2], strict=True)
    return {name: _PART.split(body)[0].strip() for name, body in sections}


def list_items(name: str, title: str) -> list[str]:
    """Return the items of the list with this title in an explanation, each as one line.

    Returns [] if the explanation has no such list.
    """
    for part in explanations()[name].split("\n\n"):
        head, _, items = part.partition(":\n- ")
        if head == title:
            return [" ".join(item.split()) for item in items.split("\n- ")]
    return []
