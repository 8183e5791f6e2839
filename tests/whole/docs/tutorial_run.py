"""Run docs/tutorials/first-run.md in an empty folder, as a user with an empty home directory.

`python -m tests.whole.docs.tutorial_run` does it, and writes the measurements to
docs/tutorials/first-run.json and into the page.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
from tests.places import ROOT
from tests.whole.docs.blocks import blocks

DOCS = ROOT / "docs" / "tutorials"
TUTORIAL = (DOCS / "first-run.md").read_text(encoding="utf-8")
RECORD = DOCS / "first-run.json"
_BLOCK_SECONDS = 1_800
_EVERY = 0.5  # seconds between checks of all processes


class Place:
    """Empty folder, home, temporary folder, and a virtual environment that can import Buckeye.

    `arguments` are the command lines of all processes seen during a run; `said` is the printed output.
    """

    def __init__(self, root, **variables):
        self.root = root
        self.folder, self.home, self.temporary = (root / name for name in ("work", "home", "tmp"))
        root.mkdir(exist_ok=True)
        for path in (self.folder, self.home, self.temporary):
            path.mkdir()
        python = _virtual_environment(root / "python")
        path = [str(python.parent), str(Path(sys.executable).parent), os.environ["PATH"]]
        self.env = {
            "PATH": os.pathsep.join(path),
            "HOME": str(self.home),
            "TMPDIR": str(self.temporary),
            "LANG": "C.UTF-8",
            **variables,
        }
        self.said, self.arguments = "", set()

    def run(self, script, seconds=_BLOCK_SECONDS):
        """Run a shell script unchanged; fail the test if any of its commands fails."""
        stop = threading.Event()
        looking = threading.Thread(target=self._look, args=(stop,))
        looking.start()
        try:
            done = subprocess.run(
                ["bash", "-e", "-c", script],
                cwd=self.folder,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=seconds,
                check=False,
            )
        finally:
            stop.set()
            looking.join()
        self.said += done.stdout
        assert done.returncode == 0, f"{script}\n{done.stdout[-4000:]}"
        return done.stdout

    def tutorial(self, *, before_its_configuration=lambda: None):
        """Run all blocks of the tutorial, except the installation of Buckeye itself."""
        page = TUTORIAL.partition("\n## 2. ")[2]
        for block in blocks(page):
            if block.file:
                (self.folder / block.file).write_text(block.text)
            else:
                if "buckeye rl init" in block.text:
                    before_its_configuration()
                self.run(block.text)

    def _look(self, stop):
        while not stop.wait(_EVERY):
            for process in psutil.process_iter(["cmdline"]):
                self.arguments.add("\0".join(process.info["cmdline"] or ()))


def _virtual_environment(folder):
    """Create a virtual environment without downloads; it imports missing packages from the tests' one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    outer = [path for path in sys.path if path.endswith("site-packages")]
    lines = "".join(f"import site; site.addsitedir({path!r})\n" for path in outer)
    (folder / "lib" / version / "site-packages" / "outer.pth").write_text(lines)
    pip = folder / "bin" / "pip"
    pip.write_text(f'#!/bin/sh\nexec "{folder}/bin/python" -m pip --disable-pip-version-check "$@"\n')
    pip.chmod(0o755)
    return folder / "bin" / "python"


def record_of(folder, *, day):
    """Return the page's measurements from the run's folder: rewards with intervals, date and machine."""
    figures = {
        name: json.loads((folder / "evals" / name / "figures.json").read_text())
        for name in ("before", "after")
    }
    served = (folder / "outputs" / "guess" / "logs" / "inference.stdout").read_text()
    return {
        "made_by": "python -m tests.whole.docs.tutorial_run",
        "day": day,
        "cores": os.cpu_count(),
        "dtype": re.search(r"parameters, (\w+),", served)[1],
        "tasks": figures["after"]["tasks"],
        "rollouts": figures["after"]["scored"],
        **{name: found["reward"] for name, found in figures.items()},
    }


def shown(record):
    """Return the texts with measurements on the page, by the patterns that find them."""
    before, after = (
        "{value:.2f} [{low:.2f}, {high:.2f}]".format(**record[name]) for name in ("before", "after")
    )
    return {
        r"`reward` was [^:]*? here:": f"`reward` was {before} here:",
        r"has risen to [^:]*?:": f"has risen to {after}:",
        r"Measured: .*?,\s+which": "Measured: {day}, {cores} cores, {dtype}, by `{made_by}`, which".format(
            **record
        ),
        r"the \d+ held-out tasks, each run \d+ times": (
            f"the {record['tasks']} held-out tasks, each run {record['rollouts'] // record['tasks']} times"
        ),
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        place = Place(Path(scratch) / "tutorial", HF_HUB_OFFLINE="1")
        try:
            place.tutorial()
        finally:
            print(place.said)
        record = record_of(place.folder, day=time.strftime("%Y-%m-%d"))
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    page = TUTORIAL
    for pattern, text in shown(record).items():
        page = re.sub(pattern, text, page)
    (DOCS / "first-run.md").write_text(page)
    print(RECORD.read_text())
