"""Other nodes through Slurm: within an allocation, srun starts every process as a separate job step.

Slurm places the step, binds its devices, transports its output, and ends it with the job.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

from buckeye.config.rl import RLConfig
from buckeye.errors import RunError, UsageError
from buckeye.launch.engines.node import apply_event, frames
from buckeye.launch.engines.remote_process import RemoteProcess
from buckeye.launch.hosts import Host, HostFacts, OtherNodes, ProcessSpec
from buckeye.launch.preflight.ports import address_towards

_PROGRAM = ("-m", "buckeye.launch.engines.node")
_SCONTROL_SECONDS = 60.0
_END_SECONDS = 20.0
_LOOK_SECONDS = 5.0
_SHOWN = 2000
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def srun_nodes(config: RLConfig) -> OtherNodes:
    """Return the other nodes of this Slurm job. Raises UsageError outside a job or if it has too few."""
    listed = os.environ.get("SLURM_JOB_NODELIST")
    if listed is None or shutil.which("srun") is None:
        raise UsageError(
            "cluster.engine = srun works within a job of Slurm (sbatch, salloc). From a login node type "
            f"sbatch --nodes {config.cluster.nodes} examples/slurm/job.sh @ run.toml"
        )
    places = _places(listed)
    names = list(places)
    here = os.environ.get("SLURMD_NODENAME", names[0])
    if len(names) < config.cluster.nodes or here not in names:
        raise UsageError(
            f"cluster.nodes = {config.cluster.nodes}, and job {os.environ['SLURM_JOB_ID']} has "
            f"{len(names)}: {listed}. Ask for more (--nodes), or lower cluster.nodes."
        )
    others = [name for name in names if name != here][: config.cluster.nodes - 1]
    address = config.cluster.address or address_towards(_address_of(others[0]))
    hosts: dict[int, Host] = {
        number: SrunHost(name, address, places[name], config.cluster.join_timeout)
        for number, name in enumerate(others, 1)
    }
    return OtherNodes(address=address, hosts=hosts)


def _places(listed: str) -> dict[str, list[str]]:
    """Return the nodes of the job, with the srun flags that place a step on each.

    In a heterogeneous job the flags also name the component.
    """
    count = int(os.environ.get("SLURM_HET_SIZE", "0"))
    groups = [(f"_HET_GROUP_{number}", [f"--het-group={number}"]) for number in range(count)] or [("", [])]
    places: dict[str, list[str]] = {}
    for suffix, words in groups:
        nodes = _scontrol("show", "hostnames", os.environ.get(f"SLURM_JOB_NODELIST{suffix}", listed)).split()
        cpus = cpus_per_node(os.environ.get(f"SLURM_JOB_CPUS_PER_NODE{suffix}", ""))
        for name, have in zip_longest(nodes, cpus[: len(nodes)]):
            places[name] = [*words, *([f"--cpus-per-task={have}"] if have is not None else [])]
    return places


def cpus_per_node(text: str) -> list[int]:
    """Return the processors per node from SLURM_JOB_CPUS_PER_NODE, such as `72(x2),36`."""
    return [int(count) for count, times in _COUNT.findall(text) for _ in range(int(times or 1))]


def _scontrol(*words: str) -> str:
    try:
        done = subprocess.run(  # noqa: S603  a list of args, without a shell
            ["scontrol", *words],  # noqa: S607  each cluster installs Slurm in another folder
            capture_output=True,
            text=True,
            timeout=_SCONTROL_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise RunError(f"scontrol {' '.join(words)} does not answer: {error}") from None
    return done.stdout


def _address_of(name: str) -> str:
    """Return the address of a node; its name may resolve to the loopback, or not at all."""
    found = re.search(r"NodeAddr=(\S+)", _scontrol("show", "node", name))
    return found[1] if found else name


class SrunHost:
    """A node of the job.

    After a step on it was lost, it counts as absent until it answers again. Unless the job was started with
    `--no-kill`, Slurm ends it when a node fails.
    """

    def __init__(self, name: str, head: str, place: Sequence[str], timeout: float) -> None:
        self._name, self._head, self._timeout = name, head, timeout
        self._srun = [
            *("srun", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={name}", "--mem=0"),
            *("--gpu-bind=none", "--unbuffered", "--quiet"),  # each process gets its own list of GPUs
            *place,
            sys.executable,
            *_PROGRAM,
        ]
        self._looking: threading.Thread | None = None

    @property
    def absent(self) -> str | None:
        """Name of the node for messages if it is absent, else None."""
        return f"node {self._name}" if self._looking is not None and self._looking.is_alive() else None

    def facts(self) -> HostFacts:
        """Return the version, devices and addresses of the node."""
        return self._facts

    @cached_property
    def _facts(self) -> HostFacts:
        said = self._ask({"facts": self._head})
        return HostFacts(**{**said, "gpus": tuple(said["gpus"])})

    def choose_ports(self, count: int) -> list[int]:
        """Return free ports of the node."""
        return [int(port) for port in self._ask({"ports": count})]

    def sees(self, path: Path, content: str) -> bool:
        """Return True if the node sees a file that was just written here."""
        return bool(self._ask({"sees": str(path), "content": content}))

    def start(self, start: ProcessSpec) -> RemoteProcess:
        """Start a process on the node; it is lost if the node is."""
        return _Step(self._name, self._srun, start, self._miss).process

    def _miss(self) -> None:
        """Mark the node as absent after a lost step, and check in a thread when it is back."""
        if self.absent is None:
            self._looking = threading.Thread(target=self._look, name=self._name, daemon=True)
            self._looking.start()

    def _look(self) -> None:
        while True:
            with suppress(RunError):
                self._ask({"ports": 0})
                return
            time.sleep(_LOOK_SECONDS)

    def _ask(self, question: Mapping[str, Any]) -> Any:
        try:
            done = subprocess.run(  # noqa: S603  a list of args, without a shell
                [*self._srun, "ask", json.dumps(question)],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=self._timeout,
                check=False,
            )
            if done.returncode == 0:
                return json.loads(done.stdout.splitlines()[-1])
        except subprocess.TimeoutExpired:
            raise RunError(
                f"Node {self._name} did not answer within {self._timeout:.0f} s (cluster.join_timeout)."
            ) from None
        except (OSError, ValueError, IndexError) as error:
            raise RunError(f"Node {self._name} could not be asked: {error}") from None
        raise RunError(f"Node {self._name} could not be asked:\n{done.stderr.strip()[-_SHOWN:]}")


class _Step:
    """One srun with one process.

    Requests go to its stdin, so that no key is visible in the command line; events come from its stdout. It
    ends when its stdin closes, so it never outlives the launcher.
    """

    def __init__(self, name: str, srun: list[str], start: ProcessSpec, lost: Callable[[], None]) -> None:
        self._name, self._lost = name, lost
        self._last = b""
        self.process = RemoteProcess(start.stdout, self._send)
        self._step = subprocess.Popen(  # noqa: S603  a list of args, without a shell
            [*srun, "carry"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._say({"start": list(start.argv[1:]), "env": dict(start.env), "cwd": os.getcwd()})
        self._complaints = threading.Thread(target=self._hear_complaints, daemon=True)
        self._complaints.start()
        threading.Thread(target=self._listen, name=start.title, daemon=True).start()

    def _send(self, number: int, session: bool) -> None:
        self._say({"signal": number, "session": session})
        if number == signal.SIGKILL:
            timer = threading.Timer(_END_SECONDS, self._step.kill)
            timer.daemon = True
            timer.start()

    def _say(self, words: Mapping[str, Any]) -> None:
        assert self._step.stdin is not None
        with suppress(OSError, ValueError):  # srun has ended, which the listening thread reports
            self._step.stdin.write(json.dumps(words).encode() + b"\n")
            self._step.stdin.flush()

    def _listen(self) -> None:
        assert self._step.stdout is not None
        problem = ""
        try:
            for event in frames(self._step.stdout):
                apply_event(self.process, event)
        except ValueError as error:
            problem = f" ({error})"
            self._step.kill()
        code = self._step.wait()
        self._complaints.join(_END_SECONDS)
        words = self._last.decode(errors="replace").strip() or f"srun ended with code {code}"
        if self.process.returncode is None:
            self._lost()
        self.process.record_loss(f"lost its node {self._name}: {words}{problem}")

    def _hear_complaints(self) -> None:
        assert self._step.stderr is not None
        for line in self._step.stderr:
            self._last = line
            self.process.record_output(line)
