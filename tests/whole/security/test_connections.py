"""Many connections without a request, from a client without the key."""

from __future__ import annotations

import os
import resource
import socket
import sys
from contextlib import ExitStack

import httpx
import pytest
from tests.mcp.gateway.client import gateway, scripted

IDLE, DESCRIPTORS = 150, 64


@pytest.mark.e2e
def test_idle_connections_do_not_keep_others_out(tmp_path, monkeypatch):
    launcher = tmp_path / "few"
    launcher.write_text(
        f"#!{sys.executable}\nimport os, resource, sys\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({DESCRIPTORS}, {DESCRIPTORS}))\n"
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])\n"
    )
    launcher.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(launcher))
    with (
        gateway(tmp_path, "--key", "--command", scripted()) as running,
        ExitStack() as stack,
    ):
        held = [
            stack.enter_context(socket.create_connection(("127.0.0.1", running.port))) for _ in range(IDLE)
        ]
        for one in held[::3]:
            one.sendall(b"POST /mcp HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")  # never finished
        for _ in range(5):
            url = f"http://127.0.0.1:{running.port}/health"
            assert httpx.get(url, timeout=30).status_code == 200
        assert len(os.listdir(f"/proc/{running.process.pid}/fd")) <= DESCRIPTORS
        assert "connections" in running.log()
        assert len(running.log()) < 20_000
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > DESCRIPTORS
