"""What the command looks like: help that fits a screen, completion, colours, narrow and wide terminals."""

import os
import pty
import re
import select
import subprocess
import sys
from pathlib import Path

import pytest
from tests.command import run_here

from buckeye import __version__
from buckeye.base.columns import aligned
from buckeye.cli import help as help_page
from buckeye.cli.app import app
from buckeye.cli.launch import COMMANDS, RL_COMMANDS

BUCKEYE = [sys.executable, "-m", "buckeye"]


def run(*words, **variables):
    env = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], **variables}
    return subprocess.run([*BUCKEYE, *words], capture_output=True, text=True, check=False, env=env)


def on_a_terminal(*words, columns, **variables):
    """What a command writes to a terminal of this width."""
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


def plain(text):
    return re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", text)


@pytest.mark.parametrize("words", [("--help",), ("env", "--help")])
def test_help_fits_a_screen(words):
    lines = run(*words, COLUMNS="80").stdout.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert "..." not in "\n".join(lines[3:]).replace("stop, ...", "")  # nothing is cut off


def test_every_command_has_a_place():
    from typer.main import get_command

    root = get_command(app)
    for name, group in (("buckeye", root), ("env", root.commands["env"])):
        placed = {one for commands in help_page.GROUPS[name].values() for one in commands}
        shown = {one for one, command in group.commands.items() if not command.hidden}
        assert shown <= placed, name
        assert placed - shown == set(), name


@pytest.mark.parametrize("program", [*COMMANDS, ""])
def test_every_program_says_its_version(program, tmp_path):
    done = run_here(*program.split(), "--version", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"buckeye {__version__}\n")


@pytest.mark.parametrize("word", RL_COMMANDS)
def test_every_command_of_rl_explains_itself(word, tmp_path):
    done = run_here("rl", word, "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")
    assert f"rl {word}" in done.stdout.splitlines()[0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_no_line_is_wider_than_the_terminal(columns):
    shown = plain(on_a_terminal("--help", columns=columns))
    assert max(map(len, shown.splitlines())) <= columns
    assert "orchestrator" in shown


def test_no_color():
    assert "\x1b[" in on_a_terminal("--help", columns=80)
    assert not re.search(r"\x1b\[3\d", on_a_terminal("--help", columns=80, NO_COLOR="1"))


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("buckeye gat", ["gateway"]),
        ("buckeye env pu", ["push"]),
        ("buckeye env push --im", ["--image"]),
        ("buckeye rl res", ["resume"]),
        ("buckeye rl --gp", ["--gpus"]),
        ("buckeye rl --trainer.optim.max", ["--trainer.optim.max-norm"]),
        ("buckeye sft --data.val-p", ["--data.val-path"]),
        ("rl sta", ["status"]),
        ("rl clean out --dry", ["--dry-run"]),
        ("rl pods ter", ["terminate"]),
        ("rl @ ru", []),  # so that the shell completes files
        ("rl @ run.toml --max-st", ["--max-steps"]),
        ("trainer --optim.max", ["--optim.max-norm"]),
        ("inference --model.na", ["--model.name"]),
    ],
)
def test_completion(line, completed, tmp_path):
    program, *_ = line.split()
    position = str(len(line.split()) - 1)
    asked = {"_BUCKEYE_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": position}
    words = [] if program == "buckeye" else [program]
    assert run_here(*words, cwd=tmp_path, env=os.environ | asked).stdout.split() == completed


def test_what_a_shell_completes(tmp_path):
    """In bash, from the installed script: a command, a flag, a file."""
    env = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    (tmp_path / "run.toml").touch()
    script = """
        buckeye --install-completion > /dev/null && . ~/.bash_completions/rl.sh || exit 9
        typed() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _rl_completion rl; echo "${COMPREPLY[*]}"; }
        typed rl res; typed rl --trainer.optim.max; typed rl @ run; complete -p rl
    """
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "resume",
        "--trainer.optim.max-norm",
        "",  # and then, as the next line says, files
        "complete -o default -F _rl_completion rl",
    ]
    installed = {path.stem for path in (tmp_path / ".bash_completions").iterdir()}
    assert installed == {"buckeye", *COMMANDS}


def test_the_completion_script_is_shown():
    shown = subprocess.run(  # the shell is the one that the command is typed in
        ["bash", "-c", '"$0" -m buckeye --show-completion; exit $?', sys.executable],
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    assert "_BUCKEYE_COMPLETE" in shown.stdout
    assert all(f"{program}\n" in shown.stdout for program in COMMANDS)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("xyzzy",), "error: No such command 'xyzzy'. Look at: buckeye --help\n"),
        (("env", "nope"), "error: No such command 'nope'. Look at: buckeye env --help\n"),
        (
            ("env", "pusch"),
            "error: No such command 'pusch'. Did you mean 'push'? Look at: buckeye env --help\n",
        ),
        (("rl", "init", "--nope"), "error: No such option: --nope"),
        (("env", "push", "/nowhere"), "error: there is no /nowhere/buckeye.lock.yaml"),
    ],
)
def test_errors_look_the_same_and_say_what_to_type(words, says):
    done = run(*words)
    assert done.returncode == 2
    assert done.stderr.startswith(says)
    assert "--help" in done.stderr or "`buckeye " in done.stderr


def test_columns_are_folded_in_a_terminal_only(monkeypatch):
    rows = [("name", "what"), ("a", "one two three four five"), ("bb", "short")]
    assert aligned(rows).splitlines() == ["name  what", "a     one two three four five", "bb    short"]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "20")
    assert aligned(rows).splitlines() == [
        "name  what",
        "a     one two three",
        "      four five",
        "bb    short",
    ]
