"""Create pictures of command output for the documentation: docs/how-to/screens/NAME.svg, from real runs.

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
    """Create the named pictures, or all."""
    all_names = [*COMMANDS, *WIZARD]
    names = sys.argv[1:] or all_names
    if unknown := sorted(set(names) - set(all_names)):
        sys.exit(f"error: no picture named {', '.join(unknown)}\nhint: Use {', '.join(all_names)}")
    SCREENS.mkdir(exist_ok=True)
    for name, text in texts(names, COLUMNS):
        (SCREENS / f"{name}.svg").write_text(picture(text, COLUMNS), encoding="utf-8")
        print(SCREENS / f"{name}.svg")


def texts(names: Sequence[str], columns: int) -> Iterator[tuple[str, str]]:
    """Yield (name, terminal output) with colors."""
    for name in names:
        if name in COMMANDS:
            with tempfile.TemporaryDirectory() as folder:
                outputs = [_run_command(command, Path(folder), columns) for command in COMMANDS[name]]
            yield name, "\n".join(outputs)
    if any(name in WIZARD for name in names):
        with tempfile.TemporaryDirectory() as folder:
            yield from ((name, text) for name, text in _run_wizard(Path(folder), columns) if name in names)


def picture(text: str, columns: int) -> str:
    """Return terminal output as SVG."""
    with open(os.devnull, "w") as devnull:
        console = Console(record=True, width=columns, file=devnull, force_terminal=True)
        console.print(Text.from_ansi(text))
        svg = console.export_svg(title="buckeye", unique_id="buckeye")
    return svg.replace("<svg ", '<svg xml:space="preserve" ', 1)  # some programs drop spaces otherwise


def _run_command(command: str, folder: Path, columns: int) -> str:
    """Run a command; return the command line and its output on a terminal."""
    child = _spawn(command, folder, columns)
    child.expect(pexpect.EOF)
    return f"{_prompt(command)}\n{_final_screen(child.before)}"


def _run_wizard(folder: Path, columns: int) -> Iterator[tuple[str, str]]:
    """Yield the questions of `buckeye rl` in a folder with tasks and a model, each with its answer."""
    shutil.copy(ROOT / "environments" / "text_2048" / "tasks.json", folder / "games.json")
    _run_command("buckeye model tiny small --corpus games.json --layers 2 --hidden 128", folder, columns)
    child = _spawn("buckeye rl", folder, columns)
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
        yield name, head + _final_screen(text)
        head = ""
    child.wait()


def _spawn(command: str, folder: Path, columns: int) -> pexpect.spawn:
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


def _final_screen(output: str) -> str:
    """Return the final state of the screen, without lines that only showed progress."""
    text = re.sub(r"\x1b\[\?25l.*?\x1b\[\?25h", "", output, flags=re.S)
    return re.sub(r"\x1b\[[02]K|\x1b\[1A", "", text).replace("\r\n", "\n").replace("\r", "").strip("\n")


if __name__ == "__main__":
    main()
