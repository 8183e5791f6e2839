"""Pictures of what commands print, for the documentation: docs/screens/NAME.svg, from real runs of them.

    python tools/screens.py [NAME ...]

Commands run in a terminal of 80 columns, in an empty folder with an empty home.
"""

from __future__ import annotations

import os
import pty
import re
import select
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

SCREENS = Path(__file__).parents[1] / "docs" / "screens"
COLUMNS = 80
SECONDS = 300.0
COMMANDS = {
    "help": ("buckeye --help",),
    "env-help": ("buckeye env --help",),
    "init": ("buckeye rl init --command text-2048",),
    "hf": ("buckeye env new guess --dir guess", "buckeye hf guess/tasks.json --name guess-tasks --no-push"),
    "errors": (
        "buckeye env pusch",
        "buckeye env push",
        "buckeye rl --model gpt-4o-mini --dataset tasks.json",
        "buckeye rl @ run.toml",
    ),
}


def main() -> None:
    """Make the pictures that are named, or all."""
    for name in sys.argv[1:] or COMMANDS:
        SCREENS.mkdir(exist_ok=True)
        (SCREENS / f"{name}.svg").write_text(picture(COMMANDS[name]), encoding="utf-8")
        print(SCREENS / f"{name}.svg")


def picture(commands: tuple[str, ...]) -> str:
    """The commands and what they print, as SVG."""
    with open(os.devnull, "w") as nowhere, tempfile.TemporaryDirectory() as folder:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True)
        for command in commands:
            console.print(Text(f"$ {command}", style="bold green"))
            console.print(Text.from_ansi(printed(command, Path(folder))))
        return console.export_svg(title="buckeye", unique_id="buckeye")


def printed(command: str, folder: Path) -> str:
    """What a command writes to a terminal."""
    master, slave = pty.openpty()
    home = folder / ".home"
    home.mkdir(exist_ok=True)
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {"PATH": programs, "HOME": str(home), "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
    process = subprocess.Popen(
        shlex.split(command), cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=slave, stderr=slave
    )
    os.close(slave)
    written, until = b"", time.monotonic() + SECONDS
    while (time.monotonic() < until and select.select([master], [], [], 1.0)[0]) or process.poll() is None:
        try:
            written += os.read(master, 65536)
        except OSError:  # the other end is closed
            break
    os.close(master)
    process.wait(timeout=SECONDS)
    text = re.sub(r"\x1b\[\?25l.*?\x1b\[\?25h", "", written.decode(errors="replace"), flags=re.S)  # waiting
    return re.sub(r"\x1b\[[02]K|\x1b\[1A", "", text).replace("\r\n", "\n").replace("\r", "").strip("\n")


if __name__ == "__main__":
    main()
