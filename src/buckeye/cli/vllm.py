"""`buckeye vllm`: install vLLM in a separate environment."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from buckeye.base.columns import quoted
from buckeye.inference.vllm.interpreter import PYTHON_VARIABLE, default_vllm_venv, install_vllm
from buckeye.launch.preflight.devices import this_machine


def install(
    cpu: Annotated[
        bool | None,
        typer.Option("--cpu/--gpu", help="Build for CPUs or for CUDA. Default: matches the machine."),
    ] = None,
    path: Annotated[
        Path | None, typer.Option(help="Folder of the environment. Default: in Buckeye's cache.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Install vLLM in a separate virtual environment, to avoid dependency conflicts."""
    environment = path or default_vllm_venv()
    for_cpu = not this_machine().gpus if cpu is None else cpu
    installed = install_vllm(environment, cpu=for_cpu, tell=lambda line: typer.echo(line, err=True))
    if as_json:
        typer.echo(json.dumps({**asdict(installed), "path": str(environment)}, default=str))
        return
    typer.echo(f"{installed.distribution} {installed.version} installed in {environment}")
    if path is not None:
        typer.echo(f"To use it: export {PYTHON_VARIABLE}={quoted(installed.python)}")
