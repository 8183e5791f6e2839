"""`buckeye vllm`: install the separate environment of vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from buckeye.inference.vllm.interpreter import PYTHON_VARIABLE, default_vllm_venv, install_vllm
from buckeye.launch.preflight.devices import this_machine


def install(
    cpu: Annotated[
        bool | None,
        typer.Option("--cpu/--gpu", help="The build for CPUs or for CUDA. Default: as the machine."),
    ] = None,
    path: Annotated[
        Path | None, typer.Option(help="Where to make the environment. Default: Buckeye's cache.")
    ] = None,
) -> None:
    """Install vLLM beside this environment, so that its pins of torch and transformers meet nobody else's."""
    environment = path or default_vllm_venv()
    for_cpu = not this_machine().gpus if cpu is None else cpu
    found = install_vllm(environment, cpu=for_cpu, tell=lambda line: typer.echo(line, err=True))
    typer.echo(f"{found.distribution} {found.version} is ready in {environment}")
    if path is not None:
        typer.echo(f"Tell the inference server of it: export {PYTHON_VARIABLE}={found.python}")


COMMANDS = {"vllm install": install}
