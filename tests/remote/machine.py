"""Machine simulated on this one: an ssh server in separate namespaces, connected by a virtual cable.

It has its own network (a veth pair: it reaches only this end of the cable), host name and processes.
Switching it off ends all of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from buckeye.remote.base import SshTarget
from tests.remote.proxy import Proxy
from tests.remote.sshd import PROGRAM, Host, configure, kill_all_of, wait_for_port

_CLONE_NEWNET = 0x40000000
_NETWORKS = 250
_BOOT = 'hostname "$1"; ip link set lo up; read line; exec "$2" -D -e -f "$3"'
_UNSHARE = ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--mount-proc"]


def _problem() -> str | None:
    if os.geteuid() != 0 or PROGRAM is None:
        return "needs root and sshd: apt-get install openssh-server"
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "needs ip and unshare: apt-get install iproute2 util-linux"
    tried = subprocess.run([*_UNSHARE, "true"], capture_output=True, text=True, check=False)
    return None if tried.returncode == 0 else f"no namespaces can be made here: {tried.stderr.strip()}"


PROBLEM = _problem()
needs_machines = pytest.mark.skipif(PROBLEM is not None, reason=PROBLEM or "")


@contextmanager
def machine(folder: Path, *, authorized: str, reaches: tuple[int, ...] = ()) -> Iterator[Host]:
    """Run a machine until the context ends.

    `authorized` is the public key that may log in.

    `reaches` are ports of this loopback that the machine reaches on its own loopback, like internet services.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _cable() as (link, inside):
        target = SshTarget(user="root", host=inside, port=22)
        host = configure(folder, target, key=folder / "none", authorized=authorized)
        boot = ["sh", "-c", _BOOT, "sh", folder.name[:20] or "pod", str(PROGRAM), str(folder / "sshd_config")]
        with (folder / "sshd.log").open("ab") as log:
            server = subprocess.Popen(
                [*_UNSHARE, "--kill-child=KILL", *boot], stdin=subprocess.PIPE, stderr=log, stdout=log
            )
        with contextlib.ExitStack() as stack:
            stack.callback(kill_all_of, folder)
            stack.callback(_switch_off, server)
            inner = _child_of(server.pid)
            _ip("link", "set", f"{link}p", "netns", str(inner))
            _in_network_of(inner, lambda: _ip("addr", "add", f"{inside}/30", "dev", f"{link}p"))
            _in_network_of(inner, lambda: _ip("link", "set", f"{link}p", "up"))
            for port in reaches:
                stack.callback(Proxy(port, listener=_listener_of(inner, port)).close)
            assert server.stdin is not None
            server.stdin.write(b"go\n")
            server.stdin.close()
            wait_for_port(inside, 22, server)
            yield host


@contextmanager
def _cable() -> Iterator[tuple[str, str]]:
    """Yield the name of a cable and the address at its other end, whose interface is NAMEp."""
    for number in range(1, _NETWORKS):
        name = f"bkpod{number}"
        made = subprocess.run(
            ["ip", "link", "add", name, "type", "veth", "peer", "name", f"{name}p"],
            capture_output=True,
            check=False,
        )
        if made.returncode == 0:
            break
    else:
        pytest.fail("there are too many machines already: `ip link` shows their cables, bkpod*")
    ours, theirs = f"10.83.{number}.1", f"10.83.{number}.2"
    try:
        _ip("addr", "add", f"{ours}/30", "dev", name)
        _ip("link", "set", name, "up")
        yield name, theirs
    finally:
        subprocess.run(["ip", "link", "delete", name], capture_output=True, check=False)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _child_of(pid: int) -> int:
    """Return the first process of the namespaces, by its pid in this namespace."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        words = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if words:
            return int(words[0])
        time.sleep(0.02)
    raise AssertionError("the machine does not begin")


def _in_network_of(pid: int, work) -> object:
    """Do work in a thread inside another network namespace; sockets opened there stay in it."""
    found: list[object] = []

    def go() -> None:
        handle = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(handle, _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")
            found.append(work())
        finally:
            os.close(handle)

    thread = threading.Thread(target=go)
    thread.start()
    thread.join()
    assert found, "it could not be done in the other network"
    return found[0]


def _listener_of(pid: int, port: int) -> socket.socket:
    listener = _in_network_of(pid, lambda: socket.create_server(("127.0.0.1", port)))
    assert isinstance(listener, socket.socket)
    return listener


def _switch_off(server: subprocess.Popen) -> None:
    server.kill()
    server.wait()
