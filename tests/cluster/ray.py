"""A real Ray cluster on the hosts of a test."""

from __future__ import annotations

import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster.hosts import Host, wait_until

PORT = 6399


@dataclass(frozen=True)
class Ray:
    """Ray cluster whose head is the first host."""

    hosts: tuple[Host, ...]
    folder: Path
    env: Mapping[str, str]
    token: str = field(default_factory=lambda: secrets.token_hex(32))

    @property
    def variables(self) -> dict[str, str]:
        return {**self.env, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token}

    @property
    def address(self) -> str:
        return f"{self.hosts[0].address}:{PORT}"

    def start_node(self, host: Host, *, cpus: int = 2) -> subprocess.Popen[bytes]:
        leads = host is self.hosts[0]
        temporary = Path("/tmp", f"bk{host.space}")  # socket paths must be short
        role = (
            ("--head", "--port", PORT, "--include-dashboard=false", "--temp-dir", temporary)
            if leads
            else ("--address", self.address)
        )
        return host.start(
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"),
            *("--node-ip-address", host.address, "--num-cpus", cpus, *role),
            out=self.folder / f"ray-{host.name}.log",
            env=self.variables,
            cwd=self.folder,
        )

    def runs(self, host: Host) -> bool:
        log = self.folder / f"ray-{host.name}.log"
        return log.exists() and "Ray runtime started" in log.read_text()


@contextmanager
def ray_cluster(folder: Path, hosts: tuple[Host, ...], env: Mapping[str, str]) -> Iterator[Ray]:
    """Start a Ray cluster, which lives until the hosts are killed."""
    folder.mkdir(parents=True)
    running = Ray(hosts, folder, env)
    for host in hosts:
        _bring_up(running, host)
    yield running


def _bring_up(running: Ray, host: Host) -> None:
    """Start Ray, with retries: its processes have half a minute, which is too short on a busy machine."""
    for _ in range(3):
        starting = running.start_node(host)
        wait_until(
            lambda starting=starting: running.runs(host) or starting.poll() is not None,
            300,
            f"Ray runs on {host.name}",
        )
        if running.runs(host):
            return
        host.kill()
    raise AssertionError((running.folder / f"ray-{host.name}.log").read_text())
