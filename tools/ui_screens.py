"""Create pictures of `buckeye ui` for the documentation, in docs/how-to/screens.

    python tools/ui_screens.py RUN            # ui-NAME.png: the views of a run
    python tools/ui_screens.py --curves DIR   # curve-NAME.png: a normal run, and runs with a fault

Needs Debian's chromium. Shows the newest group whose rewards differ. The runs of the curves are trained
in DIR, in ten minutes on two cores.
"""

from __future__ import annotations

import json
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
from playwright.sync_api import Page, sync_playwright

SCREENS = Path(__file__).parents[1] / "docs" / "how-to" / "screens"
PICTURES = {
    "overview": ("overview", "light", 1200, 760),
    "group": ("rollouts?step={step}&group={group}", "light", 1200, 620),
    "tokens": ("rollouts?step={step}&group={group}&number=0&view=tokens&overlay=surprise", "dark", 1200, 560),
    "timeline": ("timeline?step={step}", "dark", 1200, 560),
}
"""Page, color scheme, width and height of each picture, by name."""
SECONDS = 120.0
WORDS = ("anna", "banana", "cat", "data", "map", "sad", "tree", "under", "over", "blue", "red", "sun")
REWARDS = """
import random

def share(prompt, completion, **row):
    return completion.count("a") / max(len(completion), 8)

def random_grade(prompt, completion, **row):
    return random.random()

def never(prompt, completion, **row):
    return 0.0
"""
CURVES = {
    "normal": ("share", "--trainer.optim.lr", "3e-4"),
    "rate-too-high": ("share", "--trainer.optim.lr", "1e-1"),
    "random-grader": ("random_grade", "--trainer.optim.lr", "1e-3"),
    "no-reward": ("never", "--trainer.optim.lr", "1e-3"),
    "cut-off": ("share", "--trainer.optim.lr", "1e-3", "--orchestrator.sampling.max-tokens", "3"),
}
"""Reward function and settings of each run of a small model. All but the first have one fault."""


def main() -> None:
    """Create the pictures of a run, or train the runs of `CURVES` and create theirs."""
    if sys.argv[1] == "--curves":
        folder = Path(sys.argv[2]).absolute()
        train_curves(folder)
        serve(folder, take_curves)
    else:
        run = Path(sys.argv[1]).absolute()
        serve(run, lambda base: take_pictures(base, run.name))


def train_curves(folder: Path) -> None:
    """Train the runs of `CURVES` in a folder, except those that are there."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)

    def chat() -> dict[str, str]:
        return {"prompt": " ".join(rng.choices(WORDS, k=3)), "reply": " ".join(rng.choices(WORDS, k=3))}

    chats = [
        {"messages": [{"role": "user", "content": c["prompt"]}, {"role": "assistant", "content": c["reply"]}]}
        for c in (chat() for _ in range(2000))
    ]
    prompts = [{"prompt": f"{chat()['prompt']} {number}"} for number in range(400)]
    for name, rows in {"chats.jsonl": chats, "prompts.jsonl": prompts}.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(REWARDS)
    warm = "warm/weights/step_60"
    if not (folder / warm).exists():
        tiny = "base --corpus chats.jsonl --vocab-size 384 --layers 2 --hidden 64"
        buckeye(folder, "model", "tiny", *tiny.split())
        sft = "--data.path chats.jsonl --max-steps 60 --batch-size 16 --seq-len 128"
        sft += " --optim.type muon --optim.lr 6e-3"
        buckeye(folder, "sft", "--model.name", "base", *sft.split(), "--output-dir", "warm")
    shared = "--yes --max-steps 60 --orchestrator.sampling.max-tokens 32 --orchestrator.eval.interval 20"
    for name, (reward, *settings) in CURVES.items():
        if not (folder / name / "weights" / "step_60").exists():
            data = ("--dataset", "prompts.jsonl", "--reward", f"rewards.py:{reward}", "--output-dir", name)
            buckeye(folder, "rl", "--model", warm, *data, *shared.split(), *settings)


def buckeye(folder: Path, *args: str) -> None:
    """Run a command of Buckeye in a folder."""
    subprocess.run([sys.executable, "-m", "buckeye", *args], cwd=folder, check=True)


def serve(folder: Path, take: Callable[[str], None]) -> None:
    """Serve the runs of a folder, and call `take` with the address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    argv = [sys.executable, "-m", "buckeye", "ui", str(folder), "--port", str(port)]
    server = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    try:
        wait_for(f"http://127.0.0.1:{port}/")
        take(f"http://127.0.0.1:{port}")
    finally:
        server.terminate()
        server.wait()


def take_curves(base: str) -> None:
    """Take a picture of the overview of each run of `CURVES`."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name in CURVES:
            httpx.get(f"{base}/api/runs/{name}/findings", timeout=SECONDS)
            page = browser.new_page(viewport={"width": 1200, "height": 860}, color_scheme="light")
            photograph(page, f"{base}/#/run/{name}/overview", f"curve-{name}")
        browser.close()


def photograph(page: Page, address: str, name: str) -> None:
    """Open a page, wait until it is drawn, and save its picture."""
    page.goto(address)
    page.wait_for_selector("main:not([aria-busy]) .page")
    page.wait_for_timeout(2500)
    page.screenshot(path=SCREENS / f"{name}.png")
    page.close()


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
            photograph(page, f"{base}/#/run/{run}/{path.format(**values)}", f"ui-{name}")
        browser.close()


if __name__ == "__main__":
    main()
