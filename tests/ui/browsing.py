"""The page, served to a browser: Debian's chromium."""

import shutil
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import httpx

from tests.waiting import HANG

CHROMIUM = shutil.which("chromium")


@contextmanager
def serving(runs):
    """Run `buckeye ui` on a folder; yield its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, "-m", "buckeye", "ui", str(runs), "--port", str(port)])
    base, until = f"http://127.0.0.1:{port}/", time.monotonic() + HANG
    while True:
        try:
            httpx.get(base, timeout=HANG)
            break
        except httpx.TransportError:
            assert time.monotonic() < until
            assert server.poll() is None
            time.sleep(0.1)
    try:
        yield base
    finally:
        server.terminate()
        code = server.wait(HANG)
    assert code == 0


@contextmanager
def browsing():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        found = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()
