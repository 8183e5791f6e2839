"""Commands in texts of the program, and whether the real command line would take them."""

import ast
import re
import shlex

from typer.core import TyperGroup
from typer.main import get_command

from buckeye.cli.app import app
from buckeye.cli.completion import app_of, configurations
from buckeye.cli.launch import COMMANDS, RL_COMMANDS, RUN_COMMANDS
from buckeye.config.help import flag_names
from buckeye.setup.recipe.flags import TrainFlags

VALUE = "\0"
"""Stands for what a text is filled with."""

_PROGRAMS = "|".join(["buckeye", *COMMANDS])
_QUOTED = re.compile(rf"`((?:{_PROGRAMS})(?: [^`]+))`")
_PLAIN = re.compile(
    rf"(?:^|[\s:>])((?:buckeye|rl(?= (?:{'|'.join(RL_COMMANDS)})\b))"
    r" (?!is\b|goes\b)[a-z@-].*?)(?= \| |[;,&>|\n`]|\. |  | \(|\.?$)",
    re.M,
)


def commands_in(text):
    """The commands that a text names: in back-quotes, or up to the end of a clause."""
    found = [*_QUOTED.findall(text), *_PLAIN.findall(_QUOTED.sub("", text))]
    return [command.rstrip(".") for command in found]


def texts_of(path):
    """(line, text) of every text in a Python file, with `VALUE` for what is filled in. What a module says of
    itself is left out; of functions and settings help pages show it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    parts = {id(v) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for v in node.values}
    parts |= {id(node.value) for node in tree.body[:1] if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if id(node) not in parts and (text := _text(node)):
            yield node.lineno, text


_ON_CONFIGURATIONS = {
    "doctor": {"sample", "json"},
    "tune": {"budget", "output", "json"},
}


def problem(command):
    """What the command line would say against a command, as it is named in a text; None if nothing. What is
    written in capitals or left out at the end is for the reader to fill in."""
    program, *words = _words(command)
    if program == "buckeye":
        if not words or words[0] not in COMMANDS:
            return _problem_of(get_command(app), words)
        program, *words = words
    if program == "rl" and words and (inner := app_of(words[0])) is not None:
        return _problem_of(inner, words if words[0] in RUN_COMMANDS else words[1:])
    if program == "rl" and words[:1] == ["schema"]:
        return "one directory" if len(words) > 2 else None
    flags = {"help", "help-all", "version", "debug"} | {
        name[2:] for name in flag_names(configurations()[program])
    }
    if program == "rl":
        from buckeye.cli.slurm import LauncherFlags  # the core's tests have no such command

        flags |= {name[2:] for one in (TrainFlags, LauncherFlags) for name in flag_names(one)} | {"launcher"}
    for name, own in _ON_CONFIGURATIONS.items():
        if words[:1] == [name]:
            return _problem_of_settings(words[1:], flags | own)
    return _problem_of_settings(words, flags)


def follow(runner, text):
    """Run the commands that a text names, and those that they name in turn; {command: how it ended}. What
    would begin another run is left out."""
    done, waiting = {}, commands_in(text)
    while waiting:
        command = waiting.pop()
        if command in done or " resume " in command:
            continue
        program, *words = shlex.split(command)
        done[command] = runner.here(runner.argv(*([] if program == "buckeye" else [program]), *words))
        waiting += commands_in(done[command].stdout + done[command].stderr)
    return done


def _problem_of_settings(words, flags):
    free = 0
    for word in words:
        if word.startswith("--"):
            if word[2:] not in flags and VALUE not in word and not word[2:].isupper():
                return f"no such flag: {word}"
            free = 1
        elif word == "@":
            free = 1
        elif free == 0 and not word.isupper() and VALUE not in word:
            return f"no such command: {word}"
        else:
            free -= 1
    return None


def _problem_of(command, words):
    while isinstance(command, TyperGroup) and words and not words[0].startswith("-"):
        if words[0].isupper():
            return None
        if words[0] not in command.commands:
            return f"no such command: {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    context = command.context_class(command, **command.context_settings)
    try:
        _, left, _ = command.make_parser(context).parse_args(args=list(words))
    except Exception as error:  # typer's own, which differ between its versions
        return str(error) or repr(error)
    may_have_more = command.context_settings.get("allow_extra_args") or isinstance(command, TyperGroup)
    return f"too many arguments: {left}" if left and not may_have_more else None


def _words(command):
    text = re.sub(r"\[(.*?)\]", r"\1", command).replace("...", "")
    text = re.sub(rf"(?<=[a-z]){VALUE}", "", text).replace("%s", VALUE)
    return [word.partition("|")[0] for word in shlex.split(text) if not word.isdigit()]


def _text(node):
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or VALUE for part in node.values)
    return None
