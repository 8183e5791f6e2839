"""Make pictures of command output for the documentation: docs/how-to/screens/NAME.svg, from real runs.

    python tools/screens.py [NAME ...]

Commands run in a terminal of 80 columns, in an empty folder with an empty home. The questions of `buckeye rl`
are answered at a terminal too.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pexpect
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
SCREENS = ROOT / "docs" / "how-to" / "screens"
COLUMNS = 80
LINES = 50
SECONDS = 300.0
COMMANDS = {
    "init": ("buckeye rl init --command text-2048",),
    "hf": ("buckeye env new guess --dir guess", "buckeye hf guess/tasks.json --name guess-tasks --no-push"),
}
WIZARD = {
    "rl-environment": ((r"a command line: ", "text-2048"), (r"Write .*\? \[Y/n\]: ", "y")),
    "rl-tasks": ((r"create a file\): ", "games.json"),),
    "rl-model": ((r"Where\?.*\[1\]: ", "1"), (r"Which model\?.*\[1\]: ", "1")),
    "rl-plan": ((r"Start\? \[Y/n\]: ", "n"),),
}
"""Questions and answers of one run of `buckeye rl`, grouped by picture."""


def main() -> None:
    """Make the named pictures, or all."""
    wanted = sys.argv[1:] or [*COMMANDS, *WIZARD]
    unknown = set(wanted) - COMMANDS.keys() - WIZARD.keys()
    if unknown:
        sys.exit(
            f"there is no picture {', '.join(sorted(unknown))}; there are {', '.join([*COMMANDS, *WIZARD])}"
        )
    SCREENS.mkdir(exist_ok=True)
    for name, text in texts(wanted, COLUMNS):
        (SCREENS / f"{name}.svg").write_text(picture(text, COLUMNS), encoding="utf-8")
        print(SCREENS / f"{name}.svg")


def texts(wanted: Sequence[str], columns: int) -> Iterator[tuple[str, str]]:
    """Yield (name, terminal output) with colors."""
    for name in wanted:
        if name in COMMANDS:
            with tempfile.TemporaryDirectory() as folder:
                shown = [_typed(one, Path(folder), columns) for one in COMMANDS[name]]
            yield name, "\n".join(shown)
    if any(name in WIZARD for name in wanted):
        with tempfile.TemporaryDirectory() as folder:
            yield from ((name, text) for name, text in _wizard(Path(folder), columns) if name in wanted)


def picture(text: str, columns: int) -> str:
    """Return terminal output as SVG."""
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=columns, file=nowhere, force_terminal=True)
        console.print(Text.from_ansi(text))
        drawn = console.export_svg(title="buckeye", unique_id="buckeye")
    return drawn.replace("<svg ", '<svg xml:space="preserve" ', 1)  # some programs drop spaces otherwise


def _typed(command: str, folder: Path, columns: int) -> str:
    """Run a command; return the command line and its output on a terminal."""
    child = _started(command, folder, columns)
    child.expect(pexpect.EOF)
    return f"{_prompt(command)}\n{_as_shown(child.before)}"


def _wizard(folder: Path, columns: int) -> Iterator[tuple[str, str]]:
    """Yield the questions of `buckeye rl` in a folder with tasks and a model, each with its answer."""
    shutil.copy(ROOT / "environments" / "text_2048" / "tasks.json", folder / "games.json")
    _typed("buckeye model tiny small --corpus games.json --layers 2 --hidden 128", folder, columns)
    child = _started("buckeye rl", folder, columns)
    head = f"{_prompt('buckeye rl')}\n"
    for name, questions in WIZARD.items():
        text = ""
        for question, answer in questions:
            child.expect(question)
            text += child.before + child.after
            child.sendline(answer)
            child.expect_exact(f"{answer}\r\n")  # as the terminal shows typed text
            text += child.before + child.after
        if name == next(reversed(WIZARD)):
            child.expect(pexpect.EOF)
            text += child.before
        yield name, head + _as_shown(text)
        head = ""
    child.wait()


def _started(command: str, folder: Path, columns: int) -> pexpect.spawn:
    home = folder / ".home"
    home.mkdir(exist_ok=True)
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return pexpect.spawn(
        command,
        cwd=str(folder),
        env={"PATH": programs, "HOME": str(home), "TERM": "xterm-256color", "HF_HUB_OFFLINE": "1"},
        encoding="utf-8",
        timeout=SECONDS,
        dimensions=(LINES, columns),
    )


def _prompt(command: str) -> str:
    return f"\x1b[1;32m$ {command}\x1b[0m"


def _as_shown(written: str) -> str:
    """Return the final state of the screen, without lines that only showed progress."""
    text = re.sub(r"\x1b\[\?25l.*?\x1b\[\?25h", "", written, flags=re.S)
    return re.sub(r"\x1b\[[02]K|\x1b\[1A", "", text).replace("\r\n", "\n").replace("\r", "").strip("\n")


if __name__ == "__main__":
    main()
