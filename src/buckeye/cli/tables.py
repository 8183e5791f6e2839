"""Tables that commands print."""

from __future__ import annotations

from collections.abc import Sequence

from buckeye.columns import aligned


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns under their names on stdout."""
    print(aligned([header, *rows]))
