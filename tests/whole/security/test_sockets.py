"""Every listening socket of a run on one host, and its answers to a client without a key."""

from __future__ import annotations

import ipaddress
import signal
import time

import httpx
import psutil
import pytest
from tests.run.conftest import Runner, tiny_model  # noqa: F401
from tests.waiting import HANG, wait_for

PATHS = ("/v1/models", "/metrics", "/pause", "/update_weights", "/collective_rpc", "/mcp", "/status", "/")


def listening(process):
    """Return (address, port, pid) of every listening socket of a process and its descendants."""
    found = set()
    for one in [process, *process.children(recursive=True)]:
        try:
            for kind in ("tcp", "udp"):
                for connection in one.net_connections(kind):
                    if kind == "udp" or connection.status == psutil.CONN_LISTEN:
                        found.add((connection.laddr.ip, connection.laddr.port, one.pid))
        except psutil.Error:
            continue
    return found


@pytest.mark.e2e
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_listens_on_loopback_and_answers_strangers_that_it_lives(tmp_path, tiny_model, ranks):  # noqa: F811
    runner = Runner(tmp_path, tiny_model)
    more = ("--trainer-gpu-ids", ",".join(map(str, range(1, ranks + 1)))) if ranks > 1 else ()
    running = runner.start(runner.rl("out", *more, steps=500))
    seen = set()
    try:
        process = psutil.Process(running.pid)

        def trains():
            seen.update(listening(process))
            assert running.poll() is None, running.stdout.read()
            return len(runner.metrics("out", "trainer")) > 2

        wait_for(trains, "the first steps")
        for _ in range(10):
            seen.update(listening(process))
            time.sleep(0.1)
        addresses = {address for address, _, _ in seen}
        assert addresses
        assert all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses), seen
        answered = [port for port in {port for _, port, _ in seen} if _speaks_http(port)]
        assert answered
        for port in answered:
            _refuses_strangers(port)
    finally:
        running.send_signal(signal.SIGTERM)
        running.communicate(timeout=HANG)


def _speaks_http(port):
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5, trust_env=False).status_code < 600
    except httpx.HTTPError:
        return False


def _refuses_strangers(port):
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10, trust_env=False) as stranger:
        for path in PATHS:
            for headers in ({}, {"Origin": "http://evil.example"}, {"Host": "evil.example"}):
                for method in ("GET", "POST"):
                    answer = stranger.request(method, path, headers=headers)
                    assert answer.status_code in (401, 403, 404), (port, method, path, answer.text)
        assert stranger.get("/health", headers={"Host": "evil.example"}).status_code == 403
