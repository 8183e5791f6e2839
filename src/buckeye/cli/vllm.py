"""`buckeye vllm`: the environment that vLLM runs in."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from buckeye.cli.pages import Commands

vllm_app = Commands(help="Set up vLLM in an environment of its own.", no_args_is_help=True)


@vllm_app.command("install")
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
    from buckeye.inference.vllm.install import install_vllm
    from buckeye.inference.vllm.interpreter import PYTHON_VARIABLE, default_environment
    from buckeye.run.machine import this_machine

    environment = path or default_environment()
    for_cpu = not this_machine().gpus if cpu is None else cpu
    found = install_vllm(environment, cpu=for_cpu, tell=lambda line: typer.echo(line, err=True))
    typer.echo(f"{found.distribution} {found.version} is ready in {environment}")
    if path is not None:
        typer.echo(f"Tell the inference server of it: export {PYTHON_VARIABLE}={found.python}")
