"""`buckeye rl export sky | k8s`: a run as a file for another system."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from buckeye.cli.pages import Commands
from buckeye.errors import UsageError
from buckeye.remote.export.job import read_job
from buckeye.remote.export.k8s import k8s_manifests, unsaid_by_k8s
from buckeye.remote.export.sky import sky_task, unsaid_by_sky
from buckeye.storage import write_file

export_run_app = Commands(
    name="export",
    help="A run as a file for another system. (`buckeye export` writes the model of a run.)",
    no_args_is_help=True,
    add_completion=False,
)

_Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="A run's file, as in `rl @ run.toml`.")]
_Gpus = Annotated[
    str | None,
    typer.Option(metavar="4xH100", help="Number and type. Default: what CONFIG uses, of any type."),
]
_Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="A new file. Default: print it.")
]


@export_run_app.command()
def sky(config: _Config, gpus: _Gpus = None, output: _Output = None) -> None:
    """A task for SkyPilot: many clouds, and machines that may be taken away."""
    job = read_job(config, gpus)
    _write(sky_task(job), output, unsaid_by_sky(job))


@export_run_app.command()
def k8s(
    config: _Config,
    gpus: _Gpus = None,
    image: Annotated[str, typer.Option(help="With Python and a compiler.")] = "python:3.12",
    output: _Output = None,
) -> None:
    """Manifests for Kubernetes: `kubectl apply -f FILE`."""
    job = read_job(config, gpus)
    _write(k8s_manifests(job, image), output, unsaid_by_k8s(job))


def run_export_run(argv: Sequence[str]) -> int:
    """Carry out `rl export ...`."""
    from buckeye.cli.errors import run_typer

    return run_typer(export_run_app, argv, "rl export")


def _write(text: str, output: Path | None, unsaid: Sequence[str]) -> None:
    for line in unsaid:
        typer.echo(f"note: {line}", err=True)
    if output is None:
        typer.echo(text, nl=False)
        return
    if output.exists():
        raise UsageError(f"{output} exists. Remove it, or name another file with -o.")
    write_file(output, text)
    typer.echo(str(output))
