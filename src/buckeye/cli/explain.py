"""`buckeye explain`: the meaning of an error code or a finding."""

from __future__ import annotations

import difflib
import json
from typing import Annotated

import typer

from buckeye.base.columns import align_columns
from buckeye.base.explanations import explanations
from buckeye.config.problems import did_you_mean
from buckeye.errors import UsageError


def explain(
    code: Annotated[
        str | None,
        typer.Argument(metavar="CODE", help="Such as `BK-PORT-TAKEN` or `stale_weights`. Default: list all."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print what an error code or a finding of `rl diagnose` means, and what to do."""
    known = explanations()
    if code is None and as_json:
        typer.echo(json.dumps(known, ensure_ascii=False))
        return
    if code is None:
        rows = [(name, text.splitlines()[0].removesuffix(".")) for name, text in known.items()]
        typer.echo(align_columns(rows))
        return
    names = {name.lower(): name for name in known}
    wanted = code.lower()
    if wanted not in names:
        near = [names[name] for name in difflib.get_close_matches(wanted, names)]
        hint = did_you_mean(near).strip() or "`buckeye explain` lists all"
        raise UsageError(f"no error code or finding is named {code!r}", code="BK-CLI-ARGUMENT", hint=hint)
    name, text = names[wanted], known[names[wanted]]
    typer.echo(json.dumps({name: text}, ensure_ascii=False) if as_json else f"{name}\n\n{text}")
