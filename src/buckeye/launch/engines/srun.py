"""Other nodes through Slurm. In a job, srun starts every process as a separate job step.

Slurm runs the step on its node, forwards its output, and ends it when the job ends.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

from buckeye.base.process import PYTHON, run_program
from buckeye.config.rl import RLConfig
from buckeye.errors import RunError, UsageError
from buckeye.launch.engines.node import apply_event, frames
from buckeye.launch.hosts import Host, OtherNodes
from buckeye.launch.plan import Role
from buckeye.launch.preflight.ports import address_towards
from buckeye.launch.remote_process import RemoteProcess

_PROGRAM = ("-m", "buckeye.launch.engines.node")
_SCONTROL_SECONDS = 60.0
_END_SECONDS = 20.0
_RETRY_SECONDS = 5.0
_MAX_SHOWN_CHARACTERS = 2000
_CPU_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def srun_nodes(config: RLConfig) -> OtherNodes:
    """Return the other nodes of this Slurm job.

    Raises UsageError outside a job, or if the job has fewer than `cluster.nodes` nodes.
    """
    node_list = os.environ.get("SLURM_JOB_NODELIST")
    if node_list is None or shutil.which("srun") is None:
        raise UsageError(
            "cluster.engine = srun needs a Slurm job",
            code="BK-CLUSTER",
            hint=f"on a login node, type: sbatch --nodes {config.cluster.nodes} examples/slurm/job.sh "
            "@ run.toml",
        )
    srun_flags = _srun_flags(node_list)
    names = list(srun_flags)
    own_name = os.environ.get("SLURMD_NODENAME", names[0])
    if len(names) < config.cluster.nodes or own_name not in names:
        raise UsageError(
            f"cluster.nodes = {config.cluster.nodes}, but Slurm job {os.environ['SLURM_JOB_ID']} has "
            f"{len(names)} nodes: {node_list}",
            code="BK-CLUSTER",
            hint="request more nodes (`sbatch --nodes`), or lower `cluster.nodes`",
        )
    others = [name for name in names if name != own_name][: config.cluster.nodes - 1]
    address = config.cluster.address or address_towards(_address_of(others[0]))
    hosts: dict[int, Host] = {
        number: SrunHost(name, address, srun_flags[name], config.cluster.join_timeout)
        for number, name in enumerate(others, 1)
    }
    return OtherNodes(address=address, hosts=hosts)


def _srun_flags(node_list: str) -> dict[str, list[str]]:
    """Return the names of the nodes of the job, each with the flags of srun for a step on this node.

    In a heterogeneous job the flags also name the component.
    """
    count = int(os.environ.get("SLURM_HET_SIZE", "0"))
    groups = [(f"_HET_GROUP_{number}", [f"--het-group={number}"]) for number in range(count)] or [("", [])]
    flags: dict[str, list[str]] = {}
    for suffix, group_flags in groups:
        group_list = os.environ.get(f"SLURM_JOB_NODELIST{suffix}", node_list)
        nodes = _scontrol("show", "hostnames", group_list).split()
        cpus = cpus_per_node(os.environ.get(f"SLURM_JOB_CPUS_PER_NODE{suffix}", ""))
        for name, count in zip_longest(nodes, cpus[: len(nodes)]):
            flags[name] = [*group_flags, *([f"--cpus-per-task={count}"] if count is not None else [])]
    return flags


def cpus_per_node(text: str) -> list[int]:
    """Return the processors per node from SLURM_JOB_CPUS_PER_NODE, such as `72(x2),36`."""
    return [int(count) for count, times in _CPU_COUNT.findall(text) for _ in range(int(times or 1))]


def _scontrol(*args: str) -> str:
    try:
        result = run_program(["scontrol", *args], seconds=_SCONTROL_SECONDS)
        result.check_returncode()
    except (OSError, subprocess.SubprocessError) as error:
        raise RunError(f"`scontrol {' '.join(args)}` failed: {error}", code="BK-CLUSTER") from None
    return result.stdout


def _address_of(name: str) -> str:
    """Return the address that Slurm has for a node. DNS may not know the name, or map it to loopback."""
    match = re.search(r"NodeAddr=(\S+)", _scontrol("show", "node", name))
    return match[1] if match else name


class SrunHost(Host):
    """A node of the Slurm job.

    After a job step on the node was lost, the node counts as absent until it replies to a request. Unless the
    job was started with `--no-kill`, Slurm ends the job when a node fails.
    """

    def __init__(self, name: str, head: str, flags: Sequence[str], timeout: float) -> None:
        super().__init__(head)
        self._name, self._timeout = name, timeout
        self._srun = [
            *("srun", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={name}", "--mem=0"),
            *("--gpu-bind=none", "--unbuffered", "--quiet"),  # each process gets its own list of GPUs
            *flags,
            *PYTHON,
            *_PROGRAM,
        ]
        self._reconnecting: threading.Thread | None = None

    @property
    def absent(self) -> str | None:
        """Name of the node for messages if it is absent, else None."""
        is_absent = self._reconnecting is not None and self._reconnecting.is_alive()
        return f"node {self._name}" if is_absent else None

    def start(self, role: Role, env: Mapping[str, str], stdout: Path) -> RemoteProcess:
        """Start a process on the node. The process is lost if the node is lost."""
        step = _Step(self._name, self._srun, stdout, self._mark_absent)
        step.send({"start": list(role.argv[1:]), "env": dict(env), "cwd": os.getcwd()})
        return step.process

    def _mark_absent(self) -> None:
        """Mark the node as absent, and start a thread that waits until the node replies."""
        if self.absent is None:
            self._reconnecting = threading.Thread(target=self._reconnect, name=self._name, daemon=True)
            self._reconnecting.start()

    def _reconnect(self) -> None:
        while True:
            with suppress(RunError):
                self.choose_ports(0)
                return
            time.sleep(_RETRY_SECONDS)

    def _request(self, method: str, *args: Any) -> Any:
        try:
            words = [*self._srun, "query", json.dumps([method, *args])]
            result = run_program(words, seconds=self._timeout)
            if result.returncode == 0:
                return json.loads(result.stdout.splitlines()[-1])
        except subprocess.TimeoutExpired:
            raise RunError(
                f"no reply from node {self._name} within {self._timeout:.0f} s",
                code="BK-CLUSTER",
                hint="check the node, or raise `cluster.join_timeout`",
            ) from None
        except (OSError, ValueError, IndexError) as error:
            raise RunError(f"no valid reply from node {self._name}: {error}", code="BK-CLUSTER") from None
        stderr = result.stderr.strip()[-_MAX_SHOWN_CHARACTERS:]
        raise RunError(
            f"srun failed on node {self._name} with exit code {result.returncode}:\n{stderr}",
            code="BK-CLUSTER",
        )


class _Step:
    """A job step: an srun that runs one process on the node.

    The launcher writes commands to the stdin of srun, so that no key is visible in the command line. It reads
    events from the stdout of srun. The step ends when its stdin closes, so it ends with the launcher.
    """

    def __init__(self, name: str, srun: list[str], stdout: Path, on_loss: Callable[[], None]) -> None:
        self._name, self._on_loss = name, on_loss
        self._last_error = b""
        self.process = RemoteProcess(stdout, self._send_signal)
        self._step = subprocess.Popen(  # noqa: S603  a list of args, without a shell
            [*srun, "run"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._stderr_reader = threading.Thread(target=self._read_stderr, daemon=True)
        self._stderr_reader.start()
        threading.Thread(target=self._read_events, daemon=True).start()

    def _send_signal(self, number: int, session: bool) -> None:
        self.send({"signal": number, "session": session})
        if number == signal.SIGKILL:
            timer = threading.Timer(_END_SECONDS, self._step.kill)
            timer.daemon = True
            timer.start()

    def send(self, command: Mapping[str, Any]) -> None:
        """Send a command to `run` of `engines/node.py`, which runs in the step."""
        assert self._step.stdin is not None
        with suppress(OSError, ValueError):  # srun has ended; `_read_events` reports this
            self._step.stdin.write(json.dumps(command).encode() + b"\n")
            self._step.stdin.flush()

    def _read_events(self) -> None:
        assert self._step.stdout is not None
        problem = ""
        try:
            for event in frames(self._step.stdout):
                apply_event(self.process, event)
        except ValueError as error:
            problem = f" ({error})"
            self._step.kill()
        code = self._step.wait()
        self._stderr_reader.join(_END_SECONDS)
        reason = self._last_error.decode(errors="replace").strip() or f"srun ended with exit code {code}"
        if self.process.returncode is None:
            self._on_loss()
        self.process.record_loss(f"lost its node {self._name}: {reason}{problem}")

    def _read_stderr(self) -> None:
        assert self._step.stderr is not None
        for line in self._step.stderr:
            self._last_error = line
            self.process.record_output(line)
