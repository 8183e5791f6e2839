"""A real Slurm with two nodes, on the two hosts."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.hosts import Host, wait_until

_PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol")
_PATH = f"/usr/sbin:{os.environ['PATH']}"

needs_slurm = pytest.mark.skipif(
    not all(shutil.which(name, path=_PATH) for name in _PROGRAMS),
    reason="needs slurm: apt-get install slurmctld slurmd slurm-client munge",
)

_CONFIG = """
ClusterName=bk
SlurmctldHost={first.name}({first.address})
SlurmctldPort=26817
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=12
KillWait=10
JobRequeue=1
NodeName={first.name} NodeHostname={first.name} NodeAddr={first.address} Port=26818 CPUs=2 RealMemory=2000
NodeName={second.name} NodeHostname={second.name} NodeAddr={second.address} Port=26818 CPUs=2 RealMemory=2000
PartitionName=main Nodes={first.name},{second.name} Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Slurm:
    """Slurm cluster; commands run on the host `login`."""

    login: Host
    folder: Path
    env: dict[str, str]

    def run(self, *words: object, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
        done = subprocess.run(
            self.login.argv(*words),
            capture_output=True,
            text=True,
            env={**self.env, **(env or {})},
            cwd=cwd,
            timeout=900,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start_node(self, host: Host) -> None:
        host.start(
            *("slurmd", "-D", "-N", host.name, "-f", self.folder / "slurm.conf"),
            out=self.folder / "slurmd.out",
            env=self.env,
            cwd=self.folder,
        )

    def state(self, job: str) -> str:
        fields = dict(
            word.partition("=")[::2]
            for word in self.run("scontrol", "show", "job", job).split()
            if "=" in word
        )
        return fields["JobState"]


@contextmanager
def slurm(folder: Path, first: Host, second: Host) -> Iterator[Slurm]:
    """Run a Slurm cluster until the context ends, with its daemons on the hosts."""
    for name in ("munge", "state", f"spool-{first.name}", f"spool-{second.name}"):
        (folder / name).mkdir(parents=True, mode=0o755)
    folder.chmod(0o755)
    key = folder / "munge" / "key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    munge = folder / "munge"
    (folder / "slurm.conf").write_text(_CONFIG.format(first=first, second=second, folder=folder))
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("BUCKEYE_", "SLURM"))},
        "PATH": _PATH,
        "SLURM_CONF": str(folder / "slurm.conf"),
    }
    running = Slurm(first, folder, env)
    words = ("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={munge}/socket")
    files = (f"--log-file={munge}/log", f"--pid-file={munge}/pid", f"--seed-file={munge}/seed")
    first.start(*words, *files, out=munge / "out", env=env, cwd=folder)
    wait_until((munge / "socket").exists, 120, "munge answers")
    control = ("slurmctld", "-D", "-f", folder / "slurm.conf")
    first.start(*control, out=folder / "slurmctld.out", env=env, cwd=folder)
    for host in (first, second):
        running.start_node(host)
    wait_until(lambda: _idle(running) == 2, 600, "both nodes are idle")
    yield running


def _idle(running: Slurm) -> int:
    done = subprocess.run(
        running.login.argv("sinfo", "-h", "-N", "-o", "%T"),
        capture_output=True,
        text=True,
        env=running.env,
        timeout=60,
        check=False,
    )
    return done.stdout.split().count("idle")
