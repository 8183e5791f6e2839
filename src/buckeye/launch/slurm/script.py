"""A run as a job of Slurm: the script that is submitted. It starts the launcher on the first node, which
starts processes on the others as steps of the job; in containers, from where there is no srun, by Ray."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from buckeye.errors import UsageError
from buckeye.run_files.directory import RUN_FILE

FOLDER = "slurm"
SCRIPT, KEYS_FILE, LOG = "job.sh", "keys", "job.log"

_MARGIN_SECONDS = 300  # before the time is over, for the last step and its checkpoint
_TIME = re.compile(r"(\d+)([mhd])")
_SLURM_TIME = re.compile(r"\d+:\d\d:\d\d|\d+-\d+(:\d\d){0,2}")
_AMBIGUOUS = re.compile(r"(\d+)(:\d\d)?")
_WORD = re.compile(r"[^A-Za-z0-9_.-]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """Nodes of a job that are alike. `gres` is a generic resource a node."""

    nodes: int
    partition: str | None = None
    gres: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Container:
    """Where the run's programs are, in its `python`: an image for Slurm's pyxis, or one for apptainer. Beside
    the run's folders it has those of `mounts`, as `/data` or `/data:/mnt`."""

    image: str
    apptainer: bool = False
    mounts: tuple[str, ...] = ()

    def words(self, *folders: Path) -> list[str]:
        """What makes a command one in the container, which sees `folders` too."""
        seen = ",".join([*dict.fromkeys(f"{folder}:{folder}" for folder in folders), *self.mounts])
        if self.apptainer:
            return ["apptainer", "exec", "--nv", f"--bind={seen}", self.image]
        return [
            f"--container-image={self.image}",
            f"--container-mounts={seen}",
            f"--container-workdir={folders[-1]}",
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmJob:
    """What is asked of Slurm. `settings` are the words after `rl`; `time` is as Slurm writes it; `cpus` a
    node, None for the whole node; `options` are further ones of sbatch. Nodes of two kinds are two
    `components` (a heterogeneous job), the run's first node in the first."""

    settings: tuple[str, ...]
    output_dir: Path
    folder: Path
    components: tuple[Component, ...]
    account: str | None = None
    time: str | None = None
    cpus: int | None = None
    options: tuple[str, ...] = ()
    container: Container | None = None
    python: str = sys.executable

    @property
    def files(self) -> Path:
        """Where the script, the job's log, and for as long as it is needed its keys are."""
        return self.output_dir / FOLDER


def slurm_time(text: str) -> str:
    """A time limit as Slurm writes it, from `90m`, `4h`, `2d`, or from one of Slurm's own. Raises UsageError
    for anything else, for one that Slurm reads otherwise than most people, and for 0, which it takes for no
    limit."""
    if not text.strip("0:mhd-"):
        raise UsageError(f"--time {text}: Slurm takes 0 for no limit. If that is meant, leave --time out")
    if match := _AMBIGUOUS.fullmatch(text):
        first, second = match[1], match[2]
        small, large = (f"{first}m", f"{first}h") if second is None else (f"00:{text}", f"{text}:00")
        units = ("minutes", "hours") if second is None else ("minutes and seconds", "hours and minutes")
        raise UsageError(
            f"--time {text}: these are {units[0]} to Slurm, and {units[1]} to many. Write {small} or {large}"
        )
    if match := _TIME.fullmatch(text):
        minutes = int(match[1]) * {"m": 1, "h": 60, "d": 24 * 60}[match[2]]
        days, rest = divmod(minutes, 24 * 60)
        hours = f"{rest // 60:02}:{rest % 60:02}:00"
        return f"{days}-{hours}" if days else hours
    if _SLURM_TIME.fullmatch(text):
        return text
    raise UsageError(f"--time {text}: write a time limit as 90m, 4h, 2d, or as Slurm does: 04:00:00")


def slurm_script(job: SlurmJob) -> str:
    """The text of the batch script. Started again, it goes on with the run."""
    several = job.container is not None and job.components[0].nodes > 1
    start = _START_ALL.replace("@EVERYWHERE@", _inside(job, f"--nodes={job.components[0].nodes}"))
    body = _BODY.replace("@START@", start if several else _START)
    return f"{_directives(job)}{_SETTINGS.format(**_words(job))}{body}"


def _directives(job: SlurmJob) -> str:
    name = _WORD.sub("-", job.output_dir.name) or "run"
    first, *others = [_of_component(job, component) for component in job.components]
    lines = [
        f"--job-name=buckeye-{name}",
        *first,
        f"--chdir={job.folder}",
        f"--output={job.files / LOG}",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{_MARGIN_SECONDS}",
        *job.options,
    ]
    for other in others:
        lines += ["hetjob", *other]
    for line in lines:
        if not line.isprintable() or (" " in line and not line.startswith(("--chdir", "--output"))):
            raise UsageError(f"{line!r} cannot be an option of sbatch")
    quoted = [line if " " not in line else line.replace("=", '="', 1) + '"' for line in lines]
    return "#!/bin/bash\n" + "".join(f"#SBATCH {line}\n" for line in quoted)


def _of_component(job: SlurmJob, component: Component) -> list[str]:
    """What each component is asked for anew."""
    return [
        f"--nodes={component.nodes}",
        "--ntasks-per-node=1",
        *([f"--cpus-per-task={job.cpus}"] if job.cpus is not None else ["--exclusive", "--mem=0"]),
        *([f"--gres={component.gres}"] if component.gres is not None else []),
        *([f"--partition={component.partition}"] if component.partition is not None else []),
        *([f"--account={job.account}"] if job.account is not None else []),
        *([f"--time={job.time}"] if job.time is not None else []),
    ]


def _words(job: SlurmJob) -> dict[str, str]:
    count = sum(component.nodes for component in job.components)
    return {
        "python": shlex.quote(job.python if job.container is None else "python"),
        "output": shlex.quote(str(job.output_dir)),
        "files": shlex.quote(str(job.files)),
        "settings": shlex.join(job.settings),
        "nodes": str(count) if len(job.components) > 1 else '"$SLURM_NNODES"',
        "inside": _inside(job, "--nodes=1"),
        "run_file": RUN_FILE,
        "stop": str(_MARGIN_SECONDS - 30),
    }


def _inside(job: SlurmJob, nodes: str) -> str:
    """How a command gets into the container of a node, or of each: by a step of the job."""
    if job.container is None:
        return ""
    words = shlex.join(job.container.words(job.output_dir, job.folder))
    cores = '--cpus-per-task="$SLURM_CPUS_ON_NODE" --mem=0'
    return f"srun --overlap {nodes} --ntasks-per-node=1 {cores} --gpu-bind=none --unbuffered {words}"


def exported(environ: Sequence[str]) -> list[str]:
    """The names of the variables that may go with the job: none that looks like a key, since Slurm keeps them
    where others may read them."""
    secret = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.IGNORECASE)
    return [name for name in environ if not secret.search(name)]


_SETTINGS = """
python={python}
output={output}
files={files}
settings=({settings})
nodes={nodes}
inside=({inside})
run_file={run_file}
stop_seconds={stop}
"""

_BODY = r"""
echo "== job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, start $((${SLURM_RESTART_COUNT:-0} + 1)), $(date)"
if [ -e "$files/keys" ]; then set -a; . "$files/keys"; set +a; fi
words=(rl "${settings[@]}")
if [ "$nodes" -gt 1 ]; then words+=(--cluster.nodes "$nodes"); fi
if [ -e "$output/$run_file" ]; then words+=(--resume); fi

# The time is nearly over: the run checkpoints and ends, and the job goes into the queue again.
requeue=
nearly_over() {
  requeue=1
  "${inside[@]}" "$python" -m buckeye rl stop "$output" --timeout "$stop_seconds" &
}
trap nearly_over USR1

@START@
run=$!
while :; do
  wait "$run"
  code=$?
  if ! kill -0 "$run" 2>/dev/null; then break; fi  # else it was the signal that ended the wait
done
if [ -n "$requeue" ] && [ "$code" != 0 ]; then
  exec scontrol requeue "$SLURM_JOB_ID"
fi
rm -f "$files/keys"
exit "$code"
"""

_START = r"""
# The run is led from here; what it starts on the other nodes are steps of the job (srun --overlap).
if [ "$nodes" -gt 1 ]; then words+=(--cluster.engine srun); fi
"${inside[@]}" "$python" -m buckeye "${words[@]}" &
""".strip()

_START_ALL = r"""
# Every node's container is part of a Ray cluster for as long as the run lasts. It is led from the first.
head="$(scontrol show node "$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)" |
  sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')"
export head python port=$((20000 + SLURM_JOB_ID % 10000)) RAY_AUTH_MODE=token
RAY_AUTH_TOKEN="$(head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n')"
export RAY_AUTH_TOKEN
words+=(--cluster.engine ray --cluster.address "$head" --cluster.ray-address "$head:$port")
node='
alive() { (exec 3<>"/dev/tcp/$head/$port") 2>/dev/null; }
if [ "$SLURM_NODEID" = 0 ]; then
  trap : TERM  # the run ends first
  "$python" -m ray.scripts.scripts start --head --block --node-ip-address "$head" --port "$port" \
    --include-dashboard=false --disable-usage-stats > /dev/null &
  ray=$!
  "$python" -m buckeye "$@"
  code=$?
  kill "$ray"
  wait
  exit "$code"
fi
until alive; do sleep 2; done
while alive; do
  "$python" -m ray.scripts.scripts start --block --disable-usage-stats --address "$head:$port" || sleep 5
done
exit 0'
@EVERYWHERE@ bash -c "$node" node "${words[@]}" &
""".strip()
