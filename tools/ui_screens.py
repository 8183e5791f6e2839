"""Create pictures of `buckeye ui` for the documentation: docs/how-to/screens/ui-NAME.png, of a real run.

    python tools/ui_screens.py RUN

Needs Debian's chromium. Shows the newest group whose rewards differ.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
from playwright.sync_api import sync_playwright

SCREENS = Path(__file__).parents[1] / "docs" / "how-to" / "screens"
PICTURES = {
    "overview": ("overview", "light", 1200, 760),
    "rollouts": ("rollouts?step={step}", "light", 1200, 420),
    "group": ("rollouts?step={step}&group={group}", "light", 1200, 620),
    "tokens": ("rollouts?step={step}&group={group}&number=0&view=tokens&overlay=surprise", "dark", 1200, 560),
    "timeline": ("timeline?step={step}", "dark", 1200, 560),
}
"""Page, color scheme, width and height of each picture, by name."""
SECONDS = 120.0


def main() -> None:
    """Serve the run, and create all pictures."""
    run = Path(sys.argv[1]).absolute()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    argv = [sys.executable, "-m", "buckeye", "ui", str(run), "--port", str(port)]
    server = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    try:
        wait_for(f"http://127.0.0.1:{port}/")
        take_pictures(f"http://127.0.0.1:{port}", run.name)
    finally:
        server.terminate()
        server.wait()


def wait_for(address: str) -> None:
    """Wait until the server replies."""
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            httpx.get(address, timeout=SECONDS)
            return
        except httpx.TransportError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def take_pictures(base: str, run: str) -> None:
    """Open each page and take its picture, after the findings have arrived."""
    api = f"{base}/api/runs/{run}"
    httpx.get(f"{api}/findings", timeout=SECONDS)
    groups = httpx.get(f"{api}/groups", timeout=SECONDS).json()
    differing = ((groups["low"][n] or 0) < (groups["high"][n] or 0) for n in range(len(groups["step"])))
    index = next(n for n, differs in enumerate(differing) if differs and groups["split"][n] == "train")
    values = {"step": groups["step"][index], "group": groups["group"][index]}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, (path, scheme, width, height) in PICTURES.items():
            size = {"width": width, "height": height}
            page = browser.new_page(viewport=size, color_scheme="dark" if scheme == "dark" else "light")
            page.goto(f"{base}/#/run/{run}/{path.format(**values)}")
            page.wait_for_selector("main:not([aria-busy]) .page")
            page.wait_for_timeout(2500)
            page.screenshot(path=SCREENS / f"ui-{name}.png")
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
