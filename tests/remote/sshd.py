"""Real ssh server on a loopback port, with a separate home directory and keys."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from buckeye.remote.base import SshTarget
from tests.ports import free_port
from tests.remote.venvs import ROOT

SOFTWARE = ROOT / ".cache" / "venvs" / "remote-pod"
"""Software that a pod installs, shared by several pods."""

PROGRAM = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin")

needs_sshd = pytest.mark.skipif(
    PROGRAM is None or os.geteuid() != 0, reason="needs root and sshd: apt-get install openssh-server"
)


@dataclass(frozen=True)
class Host:
    """Ssh server with the home directory on it, and the key that opens it."""

    target: SshTarget
    home: Path
    key: Path
    folder: Path

    @property
    def address(self):
        return str(self.target)


def make_key(path: Path) -> Path:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
    return path


@contextmanager
def sshd(
    folder: Path,
    *,
    port: int | None = None,
    key: Path | None = None,
    authorized: str | None = None,
    more: Mapping[str, object] | None = None,
) -> Iterator[Host]:
    """Serve until the context ends; then kill all processes started through the server."""
    folder.mkdir(parents=True, exist_ok=True)
    target = SshTarget(user="root", host="127.0.0.1", port=port or free_port())
    host = configure(folder, target, key=key or folder / "user_key", authorized=authorized, more=more)
    with (folder / "sshd.log").open("ab") as log:
        server = subprocess.Popen(
            [str(PROGRAM), "-D", "-e", "-f", folder / "sshd_config"], stderr=log, stdin=subprocess.DEVNULL
        )
    try:
        wait_for_port(target.host, target.port, server)
        yield host
    finally:
        server.terminate()
        server.wait()
        kill_all_of(folder)


def configure(
    folder: Path,
    target: SshTarget,
    *,
    key: Path,
    authorized: str | None = None,
    more: Mapping[str, object] | None = None,
) -> Host:
    """Write what an ssh server needs: `sshd_config`, keys, a home, and a `shutdown` that only logs.

    The holder of `key` or of the `authorized` public key may log in. `more` are variables of its sessions.
    """
    home = folder / "home"
    home.mkdir(exist_ok=True)
    bin_folder = folder / "bin"
    bin_folder.mkdir(exist_ok=True)
    shutdown = bin_folder / "shutdown"
    shutdown.write_text(f'#!/bin/sh\necho "$@" >> {folder}/shutdown\n')
    shutdown.chmod(0o755)
    host_key = folder / "host_key"
    if not host_key.exists():
        make_key(host_key)
    if authorized is None and not key.exists():
        make_key(key)
    authorized_keys = folder / "authorized_keys"
    authorized_keys.write_text(authorized or key.with_name(f"{key.name}.pub").read_text())
    variables = {
        **{name: value for name, value in os.environ.items() if name.startswith("PIP_")},  # the same packages
        "HOME": home,
        "PATH": f"{bin_folder}:/usr/local/bin:/usr/bin:/bin",
        "BUCKEYE_HOME": SOFTWARE,
        "HF_HUB_OFFLINE": "1",
        "POD_OF": folder,
        **(more or {}),
    }
    settings = " ".join(f"{name}={value}" for name, value in variables.items())
    (folder / "sshd_config").write_text(
        f"Port {target.port}\nListenAddress {target.host}\nHostKey {host_key}\nPidFile {folder}/pid\n"
        f"AuthorizedKeysFile {authorized_keys}\nStrictModes no\nPermitRootLogin yes\nUsePAM no\n"
        "PasswordAuthentication no\nUseDNS no\n"
        f"SetEnv {settings}\n"
    )
    Path("/run/sshd").mkdir(exist_ok=True)
    return Host(target, home, key, folder)


def processes_of(folder: Path) -> list[int]:
    """Return all processes started through a server."""
    mark = f"POD_OF={folder}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def kill_all_of(folder: Path) -> None:
    """Kill all processes started through a server, as if the machine were switched off."""
    deadline = time.monotonic() + 120
    while (left := processes_of(folder)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)


def wait_for_port(host: str, port: int, server: subprocess.Popen) -> None:
    """Wait until a server answers."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1):
            return
        assert server.poll() is None, "sshd has ended"
        time.sleep(0.05)
    raise AssertionError("sshd does not answer")
