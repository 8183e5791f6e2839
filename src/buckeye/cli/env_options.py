"""Options and tables that the commands on environments share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from buckeye.base.columns import align_columns


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows on stdout, under a header, in aligned columns."""
    print(align_columns([header, *rows]))


VariablesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--variables",
        metavar="NAME",
        help="Variable to pass to the environment, from this shell or .env; also A,B.",
    ),
]


def variable_names(options: Sequence[str] | None) -> list[str]:
    """Return the names in all `--variables` options."""
    return [name.strip() for names in options or () for name in names.split(",") if name.strip()]
