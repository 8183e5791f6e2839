"""Appearance of the command line: help that fits a screen, colors, narrow and wide terminals."""

import os
import pty
import re
import select
import subprocess
import sys

import pytest
from tests.command import run_here

from buckeye.base.columns import align_columns
from buckeye.cli.commands import command_function
from buckeye.cli.tree import BY_NAME, COMMANDS, GROUPS, TITLES, child_commands, command_lines
from buckeye.version import __version__

BUCKEYE = [sys.executable, "-m", "buckeye"]


def on_a_terminal(*words, columns, **variables):
    """Return the output of a command on a terminal of this width."""
    master, slave = pty.openpty()
    env = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "TERM": "xterm", "COLUMNS": str(columns)}
    process = subprocess.Popen([*BUCKEYE, *words], stdout=slave, stderr=slave, env=env | variables)
    os.close(slave)
    written = b""
    while select.select([master], [], [], 60)[0]:
        try:
            piece = os.read(master, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        written += piece
    os.close(master)
    process.wait()
    return written.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("words", [("--help",), ("env", "--help")])
def test_help_fits_a_screen(words, tmp_path):
    lines = run_here(*words, cwd=tmp_path, env=os.environ | {"COLUMNS": "80"}).stdout.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert "..." not in "\n".join(lines[3:]).replace("stop, ...", "")  # nothing is cut off


@pytest.mark.parametrize("group", TITLES)
def test_help_titles_list_every_command(group):
    placed = [name for names in TITLES[group].values() for name in names]
    assert sorted(placed) == sorted(child_commands(group))


def test_tree_has_at_most_51_commands_each_once():
    assert len(BY_NAME) == len(COMMANDS) <= 51
    shown = [command for command in COMMANDS if not command.hidden]
    assert [
        line.startswith(f"buckeye {command.name} ")
        for line, command in zip(command_lines(), shown, strict=True)
    ]


@pytest.mark.parametrize("words", [command.name for command in COMMANDS])
def test_every_command_has_help(words, tmp_path):
    assert callable(command_function(words))
    done = run_here(*words.split(), "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")
    assert words.removeprefix("worker ") in done.stdout.splitlines()[0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", ["--help", "rl --help", "--help-all", "env --help", "rl pods --help"])
def test_help_imports_no_configuration_and_no_run(words):
    code = (
        "import sys; from buckeye.cli.main import main\n"
        f"sys.argv = ['buckeye', *{words.split()!r}]\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = {'pydantic', 'typer', 'rich', 'psutil', 'buckeye.config', 'buckeye.run_files'}\n"
        "assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_versions(tmp_path):
    for words in ((), ("rl",)):
        done = run_here(*words, "--version", cwd=tmp_path)
        assert (done.returncode, done.stdout) == (0, f"buckeye {__version__}\n")


def test_every_group_has_a_page(tmp_path):
    for group in GROUPS.keys() - {"rl"}:
        assert run_here(*group.split(), "--help", cwd=tmp_path).stdout.startswith(f"usage: buckeye {group} ")
        assert run_here(*group.split(), cwd=tmp_path).returncode == 2


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_no_line_is_wider_than_the_terminal(columns):
    written = on_a_terminal("--help", columns=columns)
    shown = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", written)
    assert max(map(len, shown.splitlines())) <= columns
    assert "gateway" in shown
    assert "\x1b[" in written


def test_no_color():
    assert not re.search(r"\x1b\[3\d", on_a_terminal("--help", columns=80, NO_COLOR="1"))


@pytest.mark.parametrize(
    "words",
    [
        ("xyzzy",),
        ("list",),
        ("terminate",),
        ("env", "nope"),
        ("env", "pusch"),
        ("rl", "stauts"),
        ("rl", "x.toml"),
        ("rl", "init", "--nope"),
        ("env", "push", "/nowhere"),
    ],
    ids=" ".join,
)
def test_errors_have_one_form_with_hint_and_code(words, tmp_path, wording):
    done = run_here(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == wording


def test_align_columns_folds_only_in_a_terminal(monkeypatch, wording):
    rows = [("name", "what"), ("a", "one two three four five"), ("bb", "short")]
    assert align_columns(rows) == wording
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "20")
    assert align_columns(rows) == wording
