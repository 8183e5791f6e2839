"""What is to be run for a session, and whether its libraries can be imported ahead."""

from __future__ import annotations

import ast
import functools
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PYTHON = re.compile(r"python(3(\.\d+)?)?")
_FLAGS = re.compile(r"-[bBEIOPsSu]+")
_FLAGS_WITH_VALUE = ("-W", "-X")
_LONGEST_SCRIPT = 10_000
_AT_START = ("PYTHON", "LD_", "LC_", "LANG", "MALLOC_", "GLIBC_", "OMP_", "OPENBLAS_", "MKL_")

Variables = tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A command with all its variables. `cwd` None is that of this process. `outer` makes the command line
    and the variables with which a command and its variables are started behind walls, and `confine` is what
    confine.py does for it; None where there are no walls."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path | None = None
    confine: Mapping[str, Any] | None = None
    outer: Callable[[Sequence[str], Mapping[str, str]], tuple[tuple[str, ...], dict[str, str]]] | None = None

    def command_line(self, argv: Sequence[str]) -> tuple[tuple[str, ...], dict[str, str]]:
        """How `argv` is started in this program's place, and with which variables."""
        return (tuple(argv), dict(self.env)) if self.outer is None else self.outer(argv, self.env)


@dataclass(frozen=True, kw_only=True, slots=True)
class PythonCommand:
    """`python [flags] -m MODULE`, or a script that was installed beside its interpreter. `own` are the
    top-level packages of the program itself, and `variables` are those that act on an interpreter or its
    libraries before any Python code runs."""

    interpreter: str
    flags: tuple[str, ...]
    target: tuple[str, str]
    own: tuple[str, ...]
    variables: Variables

    @property
    def shown(self) -> str:
        """For people."""
        return Path(self.target[1]).name

    def searched_first(self, program: Program) -> Path:
        """The folder that Python searches for modules first."""
        kind, name = self.target
        return (program.cwd or Path.cwd()) if kind == "module" else Path(name).resolve().parent


WithArguments = tuple[PythonCommand, tuple[str, ...]]


def start_variables(env: Mapping[str, str]) -> Variables:
    """Those that act on an interpreter, or on libraries that are not Python, before any Python code runs."""
    return tuple(sorted((name, value) for name, value in env.items() if name.startswith(_AT_START)))


@functools.lru_cache(maxsize=1000)  # it reads files: not for every session
def python_command(argv: tuple[str, ...], variables: Variables, path: str | None) -> WithArguments | None:
    """The Python program that `argv` is with this PATH, and its arguments; None for other commands."""
    found = shutil.which(argv[0], path=path)
    if found is None:
        return None
    if _PYTHON.fullmatch(Path(found).name):
        return _module(found, list(argv[1:]), variables)
    command = _script(Path(found), variables)
    return None if command is None else (command, argv[1:])


def _module(interpreter: str, words: list[str], variables: Variables) -> WithArguments | None:
    """`[flags] -m MODULE [arguments]`."""
    flags = _flags(words)
    if len(words) < 2 or words[0] != "-m":
        return None
    module = words[1]
    own = (module.partition(".")[0],)
    command = PythonCommand(
        interpreter=interpreter, flags=flags, target=("module", module), own=own, variables=variables
    )
    return command, tuple(words[2:])


def _flags(words: list[str]) -> tuple[str, ...]:
    """Take the interpreter's own flags from the beginning of `words`."""
    flags: list[str] = []
    while words:
        count = 2 if words[0] in _FLAGS_WITH_VALUE else 1
        if not words[0].startswith(_FLAGS_WITH_VALUE) and not _FLAGS.fullmatch(words[0]):
            break
        flags += words[:count]
        del words[:count]
    return tuple(flags)


def _script(path: Path, variables: Variables) -> PythonCommand | None:
    """A script that an installer has put beside its interpreter, which it names in its first line."""
    try:
        if path.stat().st_size > _LONGEST_SCRIPT:
            return None
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (OSError, ValueError, SyntaxError):
        return None
    first, second = [*text.splitlines(), "", ""][:2]
    words = shlex.split(first[2:]) if first.startswith("#!") else []
    if words == ["/bin/sh"] and second.startswith("'''exec' "):  # where the interpreter's path is long
        words = shlex.split(second[8:])[:-2]
    if not words or not _PYTHON.fullmatch(Path(words[0]).name) or Path(words[0]).parent != path.parent:
        return None
    flags = _flags(rest := words[1:])
    if rest:
        return None
    return PythonCommand(
        interpreter=words[0], flags=flags, target=("file", str(path)), own=_imports(tree), variables=variables
    )


def _imports(tree: ast.Module) -> tuple[str, ...]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
        elif isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
    return tuple(sorted(names - sys.stdlib_module_names))


def hiding(folder: Path, modules: Set[str]) -> Path | None:
    """What in a folder that is searched first stands before one of these modules, or of Python's own."""
    try:
        entries = list(folder.iterdir())
    except OSError:
        return folder
    for entry in entries:
        name = entry.stem if entry.suffix == ".py" else entry.name
        known = name in modules or name in sys.stdlib_module_names
        if known and (entry.suffix == ".py" or (entry / "__init__.py").exists()):
            return entry
    return None
