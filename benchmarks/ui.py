"""Measure the speed of the page with a long run, and the memory of its server.

`buckeye ui` serves a synthetic directory, which Debian's chromium opens through playwright.

    python benchmarks/ui.py [--steps 1000] [--rollouts 128] [--kilobytes 3] [--kept 40] [--dir DIR]
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
from diagnose import made_run
from playwright.sync_api import sync_playwright

_FILTERS = {
    "task": ("[placeholder=task]", "499", "input"),
    "outcome": ("[aria-label=Outcome]", "spread", "change"),
    "reward": ('[aria-label="Lowest mean reward"]', "0.7", "input"),
    "split": ("[aria-label=Split]", "eval", "change"),
}
"""Element, new value, and resulting event of each interaction, by name."""
_FILTER = """([where, value, event]) => new Promise((done) => {
  const count = document.querySelector('.page [role=status]'), before = count.textContent;
  const begun = performance.now(), over = () => performance.now() - begun;
  const element = document.querySelector(where);
  const look = () => requestAnimationFrame(count.textContent !== before || over() > 3000
    ? () => done([over(), before, count.textContent]) : look);
  element.value = value; element.dispatchEvent(new Event(event, {bubbles: true})); look();
})"""
_PAINTED = "performance.getEntriesByName('first-contentful-paint')[0].startTime"


def measure(run: Path) -> None:
    """Start the server, query it, open and filter pages; print the seconds of each."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    base, begun = f"http://127.0.0.1:{port}", time.perf_counter()
    argv = [sys.executable, "-m", "buckeye", "ui", str(run), "--port", str(port)]
    server = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    try:
        while not _answers(base):
            time.sleep(0.02)
        print(f"ready after {time.perf_counter() - begun:.2f} s")
        for name in ("status", "overview", "groups", "groups", "intervals", "intervals"):
            begun = time.perf_counter()
            size = len(httpx.get(f"{base}/api/runs/{run.name}/{name}", timeout=600).content)
            print(f"{name}: {time.perf_counter() - begun:.2f} s, {size / 1e6:.1f} MB")
        if browser := shutil.which("chromium"):
            _in_a_browser(base, run, browser)
        memory = psutil.Process(server.pid).memory_info().rss / 2**20
        print(f"memory of the server: {memory:.0f} MiB")
    finally:
        server.terminate()
        server.wait()


def _answers(base: str) -> bool:
    try:
        return httpx.get(f"{base}/api/runs", timeout=600).status_code == 200
    except httpx.TransportError:
        return False


def _in_a_browser(base: str, run: Path, browser: str) -> None:
    with sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page: Any = chromium.new_page()
        begun = time.perf_counter()
        page.goto(f"{base}/#/run/{run.name}/overview")
        page.wait_for_selector(".tile")
        painted = page.evaluate(_PAINTED)
        print(f"overview: figures after {time.perf_counter() - begun:.2f} s, first paint {painted:.0f} ms")
        begun = time.perf_counter()
        page.goto(f"{base}/#/run/{run.name}/rollouts")
        page.wait_for_selector("table.groups tbody tr")
        print(f"rollouts: rows after {time.perf_counter() - begun:.2f} s")
        for name, setting in _FILTERS.items():
            took, before, after = page.evaluate(_FILTER, list(setting))
            print(f"filter by {name}: {took:.0f} ms ({before} -> {after})")
        chromium.close()


def main() -> None:
    """Make the directory if it is missing, and measure."""
    with made_run(str(__doc__), kept=40) as run:
        measure(run)


if __name__ == "__main__":
    main()
