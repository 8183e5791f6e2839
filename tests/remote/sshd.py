"""A real ssh server on a port of the loopback, with a home and keys of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from buckeye.remote.base import SshTarget
from tests.remote.venvs import ROOT

SOFTWARE = ROOT / ".cache" / "venvs" / "remote-pod"
"""What a pod installs, which several pods share."""

_PROGRAM = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin")

needs_sshd = pytest.mark.skipif(
    _PROGRAM is None or os.geteuid() != 0, reason="needs root and sshd: apt-get install openssh-server"
)


@dataclass(frozen=True)
class Host:
    """`home` is the home directory there; `key` opens it."""

    target: SshTarget
    home: Path
    key: Path
    folder: Path

    @property
    def address(self):
        return str(self.target)


def make_key(path: Path) -> Path:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True, timeout=30)
    return path


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextmanager
def sshd(folder: Path, *, port: int | None = None, key: Path | None = None) -> Iterator[Host]:
    """Serve until the context ends; then everything that was started by way of it is killed."""
    home = folder / "home"
    home.mkdir(parents=True, exist_ok=True)
    bin_folder = folder / "bin"
    bin_folder.mkdir(exist_ok=True)
    shutdown = bin_folder / "shutdown"
    shutdown.write_text(f'#!/bin/sh\necho "$@" >> {folder}/shutdown\n')
    shutdown.chmod(0o755)
    user_key = key or folder / "user_key"
    if not user_key.exists():
        make_key(user_key)
    host_key = folder / "host_key"
    if not host_key.exists():
        make_key(host_key)
    authorized = folder / "authorized_keys"
    shutil.copy(f"{user_key}.pub", authorized)
    port = port or free_port()
    variables = {
        **{name: value for name, value in os.environ.items() if name.startswith("PIP_")},  # packages, as here
        "HOME": home,
        "PATH": f"{bin_folder}:/usr/local/bin:/usr/bin:/bin",
        "BUCKEYE_HOME": SOFTWARE,
        "HF_HUB_OFFLINE": "1",
        "POD_OF": folder,
    }
    settings = " ".join(f"{name}={value}" for name, value in variables.items())
    config = folder / "sshd_config"
    config.write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {host_key}\nPidFile {folder}/pid\n"
        f"AuthorizedKeysFile {authorized}\nStrictModes no\nPermitRootLogin yes\nUsePAM no\n"
        "PasswordAuthentication no\nUseDNS no\n"
        f"SetEnv {settings}\n"
    )
    Path("/run/sshd").mkdir(exist_ok=True)
    with (folder / "sshd.log").open("ab") as log:
        server = subprocess.Popen([_PROGRAM, "-D", "-e", "-f", config], stderr=log, stdin=subprocess.DEVNULL)
    try:
        _wait_for(port, server)
        yield Host(SshTarget(user="root", host="127.0.0.1", port=port), home, user_key, folder)
    finally:
        server.terminate()
        server.wait(10)
        kill_all_of(folder)


def processes_of(folder: Path) -> list[int]:
    """Everything that was started by way of a server."""
    mark = f"POD_OF={folder}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def kill_all_of(folder: Path) -> None:
    """As if the machine were switched off."""
    deadline = time.monotonic() + 20
    while (left := processes_of(folder)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)


def _wait_for(port: int, server: subprocess.Popen) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        assert server.poll() is None, "sshd has ended"
        time.sleep(0.05)
    raise AssertionError("sshd does not answer")
