"""What commands on environments share: the variables that one is given, and tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from buckeye.base.columns import aligned


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns under their names on stdout."""
    print(aligned([header, *rows]))


Variables = Annotated[
    list[str] | None,
    typer.Option(
        "--variables",
        metavar="NAME",
        help="A variable that the environment is given, from the environment or .env; also A,B.",
    ),
]


def variable_names(given: Sequence[str] | None) -> list[str]:
    """The names of all `--variables`."""
    return [name.strip() for names in given or () for name in names.split(",") if name.strip()]
