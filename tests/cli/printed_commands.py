"""Commands in the program's texts, and a check that the real command line accepts them."""

import ast
import re
import shlex

from buckeye.cli.schema import configurations
from buckeye.cli.tree import BY_NAME, child_commands, find_command
from buckeye.cli.typer_commands import typer_command
from buckeye.config.help import sections_of
from buckeye.setup.recipe.flags import TrainFlags

VALUE = "\0"
"""Placeholder for interpolated values."""

_PROGRAMS = "buckeye|rl"
_QUOTED = re.compile(rf"`((?:{_PROGRAMS})(?: [^`]+))`")
_PLAIN = re.compile(
    rf"(?:^|[\s:>])((?:buckeye|rl(?= (?:{'|'.join(child_commands('rl'))})\b))"
    r" (?!is\b|goes\b)[a-z@-].*?)(?= \| |[;,&>|\n`]|\. |  | \(|\.?$)",
    re.M,
)


def flag_names(model):
    """Return the flags of all settings. For a list of sections they are those of its first entry."""
    return [flag for section in sections_of(model, "") for flag, _ in section.settings]


def commands_in(text):
    """Return the commands that a text names: in backquotes, or up to the end of a clause."""
    found = [*_QUOTED.findall(text), *_PLAIN.findall(_QUOTED.sub("", text))]
    return [command.rstrip(".") for command in found]


def texts_of(path):
    """Yield (line, text) of each text in a Python file, with `VALUE` for interpolated values.

    Module docstrings are left out; help pages show those of functions and settings.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    parts = {id(v) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for v in node.values}
    parts |= {id(node.value) for node in tree.body[:1] if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if id(node) not in parts and (text := _text(node)):
            yield node.lineno, text


_KINDS = {
    "sft": "sft",
    "serve": "inference",
    "worker trainer": "trainer",
    "worker orchestrator": "orchestrator",
}


def problem(command):
    """Return the error of the command line for a command printed in a text, or None.

    Words in capitals, and words missing at the end, are for the reader to fill in. An interpolated name of a
    command is unknown.
    """
    program, *line = _words(command)
    name, words = find_command(line if program == "buckeye" else [program, *line])
    if name not in BY_NAME:
        return (
            None
            if not words or words[0].startswith("-") or words[0].isupper() or VALUE in words[0]
            else f"no such command: {words[0]}"
        )
    if not BY_NAME[name].takes_settings:
        return _problem_of(typer_command(name), words)
    kind = _KINDS.get(name, "rl")
    flags = {"help", "help-all", "version", "debug"} | {
        flag[2:] for flag in flag_names(configurations()[kind])
    }
    if kind == "rl":
        flags |= {flag[2:] for flag in flag_names(TrainFlags)}
    return _problem_of_settings(words, flags)


def follow(runner, text):
    """Run the commands that a text names, and those that their output names; return {command: process}.

    Commands that would start another run are left out.
    """
    done, waiting = {}, commands_in(text)
    while waiting:
        command = waiting.pop()
        if command in done or " resume " in command or command == "buckeye sft":
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
    context = command.context_class(command, **command.context_settings)
    try:
        _, left, _ = command.make_parser(context).parse_args(args=list(words))
    except Exception as error:  # typer's own, which differ between its versions
        return str(error) or repr(error)
    may_have_more = command.context_settings.get("allow_extra_args")
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
