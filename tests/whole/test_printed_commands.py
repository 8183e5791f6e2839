"""Every command that a text of the program names is one that the command line takes."""

import pytest
from tests.cli.printed_commands import commands_in, problem, texts_of
from tests.places import ROOT

from buckeye.cli.removed import REMOVED_COMMANDS

SOURCE = ROOT / "src"
# Not commands: what a shell script of ours runs is looked at by those who run it.
MACHINES = ROOT / "src/buckeye/remote"
SCRIPTS = {MACHINES / "scripts.py"}


def test_every_command_in_a_text_is_one():
    found = [
        (f"{path.relative_to(ROOT)}:{line}", command)
        for path in sorted(SOURCE.rglob("*.py"))
        if path not in SCRIPTS
        for line, text in texts_of(path)
        for command in commands_in(text)
        if command not in REMOVED_COMMANDS
    ]
    assert len(found) > 130
    assert {(place, command): said for place, command in found if (said := problem(command))} == {}


@pytest.mark.parametrize(
    ("command", "what"),
    [
        ("buckeye exprot RUN", "no such command"),
        ("buckeye export RUN ANOTHER", "too many arguments"),
        ("rl status RUN --jsno", "--jsno"),
        ("rl @ run.toml --max-stesp 3", "--max-stesp"),
        ("buckeye rl doctor @ run.toml --smaple 2", "--smaple"),
    ],
)
def test_what_is_wrong_is_found(command, what):
    assert what in problem(command)
