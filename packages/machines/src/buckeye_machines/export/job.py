"""What every export needs to know of a run, and the two scripts that install Buckeye and start it."""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from buckeye import __version__
from buckeye.base.distribution import DISTRIBUTION
from buckeye.config.load import load_config
from buckeye.config.rl import RLConfig
from buckeye.errors import UsageError
from buckeye.launch.gateways import names_of_keys
from buckeye.sizing.devices import Gpus, parse_gpus
from buckeye_machines.offers import disk_gb
from buckeye_machines.travel import inside, named_here

_WORD = re.compile(r"[^a-z0-9]+")
_HUB_ID = re.compile(r"[\w.\-]+/[\w.\-]+(@[\w.\-]+)?")
_VENV = "$HOME/buckeye-venv"
_IN_VENV = f'export PATH="{_VENV}/bin:$PATH"\n'
_RAY_PORT = 6399  # not Ray's own, which SkyPilot uses itself


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A run that is to be carried out elsewhere. `config` and `files` are relative to the project's folder,
    which is where we are; `files` are those that the configuration names. `gpus` are None for a run on the
    processor, and `nodes` machines have as many each; `keys` are names of variables that the run may need."""

    name: str
    config: Path
    nodes: int
    gpus: Gpus | None
    disk_gb: int
    output_dir: str
    environments: tuple[str, ...]
    files: tuple[Path, ...]
    keys: tuple[str, ...]


def read_job(config: Path, gpus: str | None) -> Job:
    """Read a run's file. Without `gpus` there are as many as its device ids say, of any type. Raises
    ConfigError for a wrong file, UsageError for one that needs what cannot travel."""
    root = Path.cwd().resolve()
    relative = inside(config, root)
    settings = load_config(RLConfig, ["@", str(config)], environ={})
    for what, text in (("output_dir", str(settings.output_dir)), ("its name", str(relative))):
        if not text.isprintable():
            raise UsageError(f"{config}: {what} is {text!r}, which no file of another program can hold.")
    envs = [env.id for env in settings.orchestrator.env]
    if settings.orchestrator.eval is not None:
        envs += [env.id for env in settings.orchestrator.eval.env]
    return Job(
        name="buckeye-" + (_WORD.sub("-", relative.stem.lower()).strip("-")[:40] or "run"),
        config=relative,
        nodes=settings.cluster.nodes,
        gpus=_gpus(settings, gpus, config),
        disk_gb=disk_gb(settings),
        output_dir=settings.output_dir.as_posix(),
        environments=tuple(
            dict.fromkeys(env for env in envs if _HUB_ID.fullmatch(env) and not Path(env).exists())
        ),
        files=tuple(named_here(settings.model_dump(mode="json"), root)),
        keys=tuple(names_of_keys(settings)),
    )


def install_script(job: Job) -> str:
    """Install Buckeye in a virtual environment, its engine, and the environments of the run. Running it again
    repeats nothing."""
    return f'set -eu\n[ -x "{_VENV}/bin/python" ] || python3 -m venv "{_VENV}"\n{_IN_VENV}{install_here(job)}'


def install_here(job: Job) -> str:
    """The same, into the Python that is first in the path."""
    extras = "train,ray" if job.nodes > 1 else "train"
    lines = [
        "# No index has it? Then wheels of all five distributions: pip install --find-links FOLDER",
        f"pip install --quiet '{DISTRIBUTION}[{extras}]=={__version__}'",
        "buckeye vllm install",
    ]
    for env in map(shlex.quote, job.environments):
        lines.append(f"buckeye env info {env} >/dev/null 2>&1 || buckeye env install {env}")
    return "\n".join(lines) + "\n"


def start_script(job: Job, *, output_dir: str | None = None) -> str:
    """Start the run, or go on with it where there is one already: after the machine was taken away."""
    return f"{_IN_VENV}{start_here(job, output_dir=output_dir)}"


def start_here(job: Job, *, output_dir: str | None = None, before: str = "", more: str = "") -> str:
    """The same by the `rl` that is first in the path, with shell words `before` it and `more` settings."""
    output = job.output_dir if output_dir is None else output_dir
    words = ["rl", "@", job.config.as_posix(), *(["--output-dir", output_dir] if output_dir else [])]
    return (
        f"if [ -e {shlex.quote(f'{output}/run.json')} ]; then set -- --resume; else set --; fi\n"
        f'exec {before}{shlex.join(words)} {more}"$@"\n'
    )


def start_everywhere(job: Job) -> str:
    """Start the run by a script that each of its nodes carries out, as bash, where `$rank` numbers them and
    `$head` is the address of the first: that one is the head of a Ray cluster for as long as the run lasts,
    and the others are part of it."""
    place = f'"$head:{_RAY_PORT}"'
    return (
        f'{_IN_VENV}alive() {{ (exec 3<>"/dev/tcp/$head/{_RAY_PORT}") 2>/dev/null; }}\n'
        'if [ "$rank" != 0 ]; then\n'
        "  until alive; do sleep 5; done\n"
        f"  while alive; do ray start --block --disable-usage-stats --address {place} || sleep 5; done\n"
        "  exit 0\n"
        "fi\n"
    ) + start_here(
        job,
        before=f'python -m buckeye_machines.engines.ray_cluster "$head" {_RAY_PORT} ',
        more=f'--cluster.engine ray --cluster.address "$head" --cluster.ray-address {place} ',
    )


def indented(text: str, spaces: int) -> str:
    """The lines of a block in YAML."""
    return "".join(f"{' ' * spaces}{line}\n" for line in text.splitlines())


def _gpus(config: RLConfig, given: str | None, file: Path) -> Gpus | None:
    devices = _devices(config)
    if given is None:
        return Gpus(devices) if config.trainer.model.device != "cpu" else None
    asked = parse_gpus(given)
    if asked.count < devices:
        raise UsageError(
            f"--gpus {given}: {file} uses {devices} devices (inference_gpu_ids, trainer_gpu_ids)."
        )
    return asked


def _devices(config: RLConfig) -> int:
    ids = [*config.trainer_gpu_ids, *(config.inference_gpu_ids if config.inference is not None else [])]
    return max(ids) + 1


def gib(gigabytes: int) -> int:
    """Gigabytes (10^9 bytes) in GiB, rounded up."""
    return math.ceil(gigabytes * 1e9 / 2**30)
