"""`buckeye export`: a checkpoint as a model that others can use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    run: Annotated[Path, typer.Argument(help="Output directory of `rl` or `sft`.")],
    step: Annotated[
        str | None,
        typer.Option(
            metavar="best|last|N",
            help="Which checkpoint. Default: the best by evaluation; the last if none was evaluated.",
        ),
    ] = None,
    merge_lora: Annotated[
        bool, typer.Option("--merge-lora", help="Export a complete model, not the adapter alone.")
    ] = False,
    push: Annotated[
        str | None, typer.Option(metavar="ORG/NAME", help="Also upload it to the Hugging Face hub.")
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="Make the new repository of --push a private one.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="A new directory. Default: RUN/exports/step_N; merged, step_N-merged."
        ),
    ] = None,
) -> None:
    """Write a checkpoint as a Hugging Face model with a model card, and verify it."""
    from buckeye.run.export.export import ExportRequest, export_model

    request = ExportRequest(
        run=run, step=step, merge_lora=merge_lora, output=output, push=push, private=private
    )
    exported = export_model(request, typer.echo)
    if exported.url is not None:
        typer.echo(exported.url)
    typer.echo(f"talk to it: buckeye chat {exported.directory}")
