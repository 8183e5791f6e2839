"""`buckeye rl ... --launcher slurm`: the run as a job of Slurm; `--launcher ray`: on a Ray cluster."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveInt

from buckeye.base.storage import write_file
from buckeye.cli.dry_run import carry_out
from buckeye.config.flags import apply, parse_flags
from buckeye.config.problems import report
from buckeye.config.rl import RLConfig
from buckeye.config.settings import Settings
from buckeye.config.shared import BaseConfig
from buckeye.config.structure import fields_of
from buckeye.config.validation import validate
from buckeye.errors import ConfigError, RunError, UsageError
from buckeye.launch.preflight.devices import alike, parse_gpus, short_name
from buckeye.launch.resume import resume_command, without_flags
from buckeye.launch.run_keys import keys_of_run
from buckeye.launch.slurm.script import (
    KEYS_FILE,
    LOG,
    SCRIPT,
    Component,
    Container,
    SlurmJob,
    exported,
    slurm_script,
    slurm_time,
)
from buckeye.run_files.directory import is_in_use, refuse_used

_SUBMIT_SECONDS = 60.0


class LauncherFlags(BaseConfig):
    """What is asked of Slurm or Ray."""

    launcher: Literal["local", "slurm", "ray"] = "local"
    """Who starts the run: this command here, a job of Slurm, or this command on a Ray cluster."""
    address: str | None = None
    """The Ray cluster: auto, HOST:PORT or ray://HOST:PORT; None is cluster.ray_address."""
    nodes: PositiveInt | None = None
    """How many nodes; None is cluster.nodes."""
    partition: str | None = None
    """The partition."""
    account: str | None = None
    """The account that is charged."""
    time: str | None = None
    """The time limit, as 4h. A run that needs more is continued in a new slot."""
    cpus: PositiveInt | None = None
    """Cores a node; None takes whole nodes."""
    gpus: str | None = None
    """GPUs a node, as 8 or 8xH100; None is as many as the device ids say."""
    inference_partition: str | None = None
    """Another partition for the nodes of inference: a heterogeneous job."""
    inference_gpus: str | None = None
    """Other GPUs for the nodes of inference, as 4xL40S: a heterogeneous job."""
    container_image: str | None = None
    """An image for Slurm's pyxis, with Buckeye in its python."""
    apptainer: str | None = None
    """The same for apptainer, as run.sif."""
    container_mounts: list[str] = Field(default_factory=list)
    """Folders that the container sees beside those of the run, as /data or /data:/mnt."""
    sbatch: list[str] = Field(default_factory=list)
    """Further options of sbatch, as --sbatch=--constraint=ib"""


def launch(
    argv: Sequence[str],
    load: Callable[[list[str]], RLConfig],
    carry_out_run: Callable[[RLConfig, list[str]], int],
) -> int:
    """Submit the run as a job and say how to look at it, or have it carried out with Ray; the exit code.
    Raises UsageError for words that make no sense, RunError if Slurm refuses the job."""
    flags, settings = _split(argv)
    nodes = [] if flags.nodes is None else ["--cluster.nodes", str(flags.nodes)]
    if flags.launcher == "local":
        raise UsageError("--launcher local is what happens without it: leave it out")
    if flags.launcher == "ray":
        words = [*settings, *nodes, *_ray_words(flags)]
        return carry_out_run(load(words), words)
    if flags.address is not None:
        raise UsageError("--address is of --launcher ray: leave it out")
    config = load([*settings, *nodes])
    job = _job(config, flags, without_flags(settings, ("--resume", "--dry-run", "--no-dry-run")))
    script = slurm_script(job)
    _tell_unsaid(flags)
    return carry_out(
        config,
        show=lambda: print(script, end=""),
        start=lambda: _submit_run(job, script, config, resume_command(["buckeye", "rl", *argv])),
    )


def _ray_words(flags: LauncherFlags) -> list[str]:
    """The settings that the flags stand for."""
    of_slurm = flags.model_fields_set - {"launcher", "address", "nodes"}
    if of_slurm:
        raise UsageError(f"--{sorted(of_slurm)[0]} is of --launcher slurm: Ray counts its nodes itself")
    address = [] if flags.address is None else ["--cluster.ray-address", flags.address]
    return ["--cluster.engine", "ray", *address]


def _submit_run(job: SlurmJob, script: str, config: RLConfig, again: str) -> int:
    program = shutil.which("sbatch")
    if program is None:
        raise UsageError(
            "--launcher slurm: there is no sbatch here. Type this on a login node of the cluster"
        )
    if not config.resume:
        refuse_used(config.output_dir, resume_command=again)
    if is_in_use(config.output_dir):
        raise UsageError(f"{config.output_dir} is in use by a run that is going on.")
    _write_files(job, script, config)
    number = _submit(program, job)
    print(
        f"Submitted job {number}. Its script: {shlex.quote(str(job.files / SCRIPT))}\n"
        f"  in the queue:     squeue -j {number}\n"
        f"  what it prints:   tail -f {shlex.quote(str(job.files / LOG))}\n"
        f"  how the run is:   buckeye rl status {shlex.quote(str(config.output_dir))}\n"
        f"  checkpoint, end:  buckeye rl stop {shlex.quote(str(config.output_dir))}"
    )
    return 0


def _split(argv: Sequence[str]) -> tuple[LauncherFlags, list[str]]:
    own: list[str] = []
    settings: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        name = word[2:].partition("=")[0].replace("-", "_") if word.startswith("--") else ""
        if name not in fields_of(LauncherFlags):
            settings.append(word)
            continue
        own.append(word)
        if "=" not in word and not fields_of(LauncherFlags)[name].is_flag and words:
            own.append(words.pop(0))
    parsed = parse_flags(LauncherFlags, own)
    values = Settings()
    problems = [*parsed.problems, *apply(parsed.assignments, values)]
    flags, wrong = validate(LauncherFlags, values)
    if flags is None or problems or wrong:
        raise ConfigError(report([*problems, *wrong]))
    return flags, settings


def _job(config: RLConfig, flags: LauncherFlags, words: Sequence[str]) -> SlurmJob:
    components = _components(config, flags)
    container = _container(flags)
    if container is not None and len(components) > 1:
        raise UsageError(
            "A heterogeneous job cannot be in containers: leave --inference-... or the image out"
        )
    return SlurmJob(
        settings=tuple(words),
        output_dir=config.output_dir.absolute(),
        folder=Path.cwd(),
        components=components,
        account=flags.account,
        time=slurm_time(flags.time) if flags.time is not None else None,
        cpus=flags.cpus,
        options=tuple(flags.sbatch),
        container=container,
    )


def _container(flags: LauncherFlags) -> Container | None:
    image = flags.container_image or flags.apptainer
    if flags.container_image is not None and flags.apptainer is not None:
        raise UsageError("--container-image is for pyxis, --apptainer for apptainer: name one of them")
    if image is None:
        if flags.container_mounts:
            raise UsageError("--container-mounts needs --container-image or --apptainer")
        return None
    mounts = tuple(flags.container_mounts)
    return Container(image=image, apptainer=flags.apptainer is not None, mounts=mounts)


def _components(config: RLConfig, flags: LauncherFlags) -> tuple[Component, ...]:
    """The nodes of the run, in their order, where they are alike."""
    trainer, inference = config.cluster.of_trainer, config.cluster.of_inference
    gpus = _gres(config, flags.gpus, [*config.trainer_gpu_ids, *_inference_ids(config)])
    if flags.inference_partition is None and flags.inference_gpus is None:
        return (Component(nodes=config.cluster.nodes, partition=flags.partition, gres=gpus),)
    if config.inference is None or sorted(trainer + inference) != list(range(config.cluster.nodes)):
        raise UsageError(
            "--inference-partition and --inference-gpus are for a run whose nodes have either inference or "
            "the trainer: set cluster.inference_nodes and cluster.trainer_nodes"
        )
    samplers = Component(
        nodes=len(inference),
        partition=flags.inference_partition or flags.partition,
        gres=_gres(config, flags.inference_gpus or flags.gpus, config.inference_gpu_ids),
    )
    trainers = Component(
        nodes=len(trainer),
        partition=flags.partition,
        gres=_gres(config, flags.gpus, config.trainer_gpu_ids),
    )
    if trainer + inference == list(range(config.cluster.nodes)):
        return trainers, samplers
    if inference + trainer == list(range(config.cluster.nodes)):
        return samplers, trainers
    raise UsageError(
        f"The nodes of inference {inference} and of the trainer {trainer} must follow each other: a "
        "heterogeneous job has the nodes of one component, and then those of the other"
    )


def _inference_ids(config: RLConfig) -> list[int]:
    return config.inference_gpu_ids if config.inference is not None else []


def _gres(config: RLConfig, given: str | None, ids: Sequence[int]) -> str | None:
    if given is not None:
        asked = parse_gpus(given)
        kind = f":{short_name(asked.type).lower()}" if asked.type else ""
        return f"gpu{kind}:{asked.count}"
    return None if config.trainer.model.device == "cpu" else f"gpu:{max(ids) + 1}"


def _tell_unsaid(flags: LauncherFlags) -> None:
    """What the request for GPUs cannot say."""
    for asked in [parse_gpus(given) for given in (flags.gpus, flags.inference_gpus) if given is not None]:
        if not (others := alike(asked.type)):
            continue
        print(
            f"note: gpu:{short_name(asked.type).lower()} does not say how much memory: Slurm may give "
            f"{' or '.join(others)}, too. Where that matters: --sbatch=--constraint=...",
            file=sys.stderr,
        )


def _write_files(job: SlurmJob, script: str, config: RLConfig) -> None:
    write_file(job.files / SCRIPT, script)
    keys = keys_of_run(config)
    lines = [f"{name}={shlex.quote(value)}\n" for name, value in keys.items()]
    write_file(job.files / KEYS_FILE, "".join(lines), mode=0o600)
    if keys:
        print(f"Keys that the job gets, in a file that is deleted at its end: {', '.join(sorted(keys))}")


def _submit(program: str, job: SlurmJob) -> str:
    """Raises RunError with what sbatch says."""
    env = {name: os.environ[name] for name in exported(list(os.environ))}
    try:
        done = subprocess.run(  # noqa: S603  a list of words, without a shell
            [program, "--parsable", str(job.files / SCRIPT)],
            env=env,
            capture_output=True,
            text=True,
            timeout=_SUBMIT_SECONDS,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RunError(f"The job could not be submitted: {error}") from None
    if done.returncode != 0:
        raise RunError(f"Slurm did not take the job: {done.stderr.strip() or done.stdout.strip()}")
    if done.stderr.strip():
        print(done.stderr.strip(), file=sys.stderr)
    return done.stdout.strip().partition(";")[0]
