"""`buckeye rl export sky | k8s | rayjob`: a run as a file for another system."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from buckeye.base.storage import write_file
from buckeye.cli.help import Commands
from buckeye.errors import UsageError
from buckeye.sizing.devices import alike, short_name
from buckeye_machines.export.job import (
    Job,
    indented,
    install_script,
    read_job,
    start_everywhere,
    start_script,
)
from buckeye_machines.export.k8s import (
    RAY_IMAGE,
    k8s_manifests,
    rayjob_manifests,
    unsaid_by_k8s,
    unsaid_by_rayjob,
)

# A task file for SkyPilot, which finds machines at many clouds and starts again when one is taken away.

_ACCELERATORS = {
    "A100_80GB": "A100-80GB",
    "V100_32GB": "V100-32GB",
    "RTX6000Ada_48GB": "RTX6000-Ada",
    "RTX5000Ada_32GB": "RTX5000-Ada",
    "RTX4000Ada_20GB": "RTX4000-Ada",
    "RTX2000Ada_16GB": "RTX2000-Ada",
    "RTX_PRO_6000B_96GB": "RTXPRO6000",
}
"""Where SkyPilot's name is not ours without the memory."""

_SET = "set -eu\n"
_NODE_OF_SKY = f'{_SET}rank="$SKYPILOT_NODE_RANK"\nhead="$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"\n'
_OF_SEVERAL = """\
# All nodes must see the output directory: mount a bucket or a volume there (file_mounts).
# They are one Ray cluster, with a token of yours: export RAY_AUTH_TOKEN="$(openssl rand -hex 32)", then
#   sky launch FILE --secret RAY_AUTH_TOKEN
"""
_MODE_OF_RAY = "envs:\n  RAY_AUTH_MODE: token\n"
_KEY_OF_RAY = "  RAY_AUTH_TOKEN: null  # without one nothing starts\n"
_ANY = ("H100", "H200", "A100-80GB")  # where no type is asked for


def sky_task(job: Job) -> str:
    """The file's text: `sky launch FILE`, or `sky jobs launch FILE` for machines that may be taken away."""
    accelerators = ""
    if job.gpus is not None:
        names = [_name(job.gpus.type)] if job.gpus.type else _ANY
        counts = ", ".join(f"{name}: {job.gpus.count}" for name in names)
        accelerators = f"  accelerators: {{{counts}}}\n"
    secrets = "".join(f"  {name}: ''\n" for name in job.keys)
    several = job.nodes > 1
    return (
        "# Written by `buckeye rl export sky`. Start it in this folder, which is copied to the machine:\n"
        "#   sky launch FILE              then: sky down\n"
        "#   sky jobs launch FILE         goes on elsewhere when a machine is taken away; mount a bucket at\n"
        f"#                                {job.output_dir} (file_mounts), so that the checkpoints stay\n"
        f"{_OF_SEVERAL if several else ''}"
        "# Keys: --secret HF_TOKEN takes one from your environment.\n"
        f"name: {job.name}\n"
        "workdir: .\n"
        f"{f'num_nodes: {job.nodes}{chr(10)}' if several else ''}"
        "resources:\n"
        f"{accelerators}"
        f"  disk_size: {job.disk_gb}\n"
        f"{_MODE_OF_RAY if several else ''}"
        "secrets:\n"
        f"{secrets}"
        f"{_KEY_OF_RAY if several else ''}"
        "setup: |\n"
        f"{indented(install_script(job), 2)}"
        "run: |\n"
        f"{indented(_NODE_OF_SKY + start_everywhere(job) if several else _SET + start_script(job), 2)}"
    )


def unsaid_by_sky(job: Job) -> list[str]:
    """What the file cannot say of the job, a line each."""
    others = alike(job.gpus.type, _name) if job.gpus is not None and job.gpus.type else []
    if job.gpus is None or not others:
        return []
    name = _name(job.gpus.type)
    return [f"SkyPilot's {name} does not say how much memory: it may be {' or '.join(others)}, too"]


def _name(gpu_type: str) -> str:
    return _ACCELERATORS.get(gpu_type, short_name(gpu_type))


# `buckeye rl export sky | k8s | rayjob`: a run as a file for another system.

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


@export_run_app.command()
def rayjob(
    config: _Config,
    gpus: _Gpus = None,
    image: Annotated[str, typer.Option(help="With Python and Ray.")] = RAY_IMAGE,
    output: _Output = None,
) -> None:
    """A RayJob for Kubernetes with KubeRay, on as many pods as cluster.nodes: `kubectl apply -f FILE`."""
    job = read_job(config, gpus)
    _write(rayjob_manifests(job, image), output, unsaid_by_rayjob(job))


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
