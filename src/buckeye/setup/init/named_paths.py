"""Folders and files in a command line: find them, and copy them so that tools can be tried on the copies."""

from __future__ import annotations

import fnmatch
import functools
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from buckeye.base.columns import counted
from buckeye.base.disk import human_bytes
from buckeye.mcp.workdir.folder import WORKDIR

_LAUNCHERS = {
    "npx", "bunx", "uvx", "uv", "pipx", "run", "exec", "env", "node", "deno", "tsx", "bun", "dlx", "pnpm",
    "yarn", "x",
}  # fmt: skip
_PYTHON = re.compile(r"(python|pypy)[\d.]*")
_WITH_VALUE = {
    "-m", "-W", "-X", "-p", "-r", "--directory", "--project", "--from", "--with", "--with-editable",
    "--with-requirements", "--python", "--package", "--index", "--index-url", "--extra-index-url",
    "--require", "--import", "--loader", "--env-file", "--default-index", "--find-links",
}  # fmt: skip
_BEFORE = re.compile(r"(--?[\w-]+=|\w+=)?(sqlite:///|file://)?")
_MOUNT = re.compile(r"(?:type=bind,)?(?:src=|source=)?(?P<path>[^:,]+)(?P<rest>[:,].+)")
_KEYS = [".env", ".env.*", ".netrc", "_netrc", ".npmrc", ".pypirc", ".git-credentials", ".pgpass", ".ssh"]
_KEYS += [".aws", ".gnupg", ".kube", ".docker", "id_rsa", "id_ed25519", "*.pem", "*.p12", "*.pfx", "*.key"]
_NO_KEYS = (".env.example", ".env.sample", ".env.template")
_MOST_BYTES, _MOST_FILES = 200_000_000, 20_000


def program_index(words: Sequence[str]) -> int:
    """Return the index of the program in a command line.

    The program is the module, package or script that `python`, `npx`, `uv run` and the like start.
    """
    at = 0
    while at < len(words) - 1:
        word = words[at]
        if word == "-m" or word in _WITH_VALUE:
            if word == "-m":
                return at + 1
            at += 2
        elif word.startswith("-") or _is_launcher(word) or re.match(r"\w+=", word):
            at += 1
        else:
            break
    return min(at, len(words) - 1)


def _is_launcher(word: str) -> bool:
    name = Path(word).name
    return name in _LAUNCHERS or _PYTHON.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class Named:
    """A command line with `{workdir}` in place of its paths, and these paths by their name in that folder."""

    words: tuple[str, ...]
    paths: dict[str, Path]


def named_paths(words: Sequence[str]) -> Named:
    """Find the folders and files in the arguments of a command, without its own program."""
    program, made, paths = program_index(words), list(words), dict[str, Path]()
    for at, word in enumerate(words):
        if at <= program and not re.match(r"[A-Z_]+=", word):
            continue
        of_a_flag = at > 0 and words[at - 1].startswith("--")
        found = _path_in(word, of_a_flag=of_a_flag, mount=Path(words[0]).name in ("docker", "podman"))
        if found is not None:
            before, path, after = found
            made[at] = before + _placed(path, paths) + after
    return Named(tuple(made), paths)


def _path_in(word: str, *, of_a_flag: bool, mount: bool) -> tuple[str, Path, str] | None:
    """Return the text before a path in an argument, the path, and the text after it; None without a path.

    A bare name of an existing file counts only after a flag. Elsewhere it is more likely a command of the
    server.
    """
    match = _BEFORE.match(word)
    before = match[0] if match is not None else ""
    rest, after = word[len(before) :], ""
    if mount and (volume := _MOUNT.fullmatch(rest)) is not None:
        before, rest, after = before + rest[: volume.start("path")], volume["path"], volume["rest"]
    path = Path(rest).expanduser()
    if not rest or rest.startswith("-") or len(rest) > 4096:
        return None
    path = Path(os.path.abspath(path))
    whole = rest.startswith(("/", "~"))
    written = of_a_flag or "/" in rest or rest in (".", "..") or bool(path.suffix) or bool(before)
    if os.path.exists(path) and not (path.is_dir() or path.is_file()):
        return None  # a device, a pipe, a socket
    is_there = written and os.path.exists(path)
    may_be_made = whole and path.parent != Path("/") and path.parent.is_dir()
    return (before, path, after) if is_there or may_be_made else None


def _placed(path: Path, paths: dict[str, Path]) -> str:
    """Return the place of a path in `{workdir}`; add it to `paths`, unless one of them contains it."""
    for name, known in paths.items():
        if path.is_relative_to(known):
            return str(Path(WORKDIR, name, path.relative_to(known)))
    if not path.exists():  # the server creates it
        return f"{WORKDIR}/{path.name}"
    name, number = path.name or "root", 2
    while name in paths:
        name, number = f"{path.stem}-{number}{path.suffix}", number + 1
    paths[name] = path
    return f"{WORKDIR}/{name}"


@dataclass(slots=True)
class Copy:
    """Counts of the copied files and bytes, and the names that were left out."""

    files: int = 0
    bytes: int = 0
    cut: int = 0
    left: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        left = [f"without {name}" for name in sorted(self.left)]
        left += [f"{self.cut} files more are too much to copy"] if self.cut else []
        return "; ".join([f"{counted(self.files, 'file')}, {human_bytes(self.bytes)}", *left])

    def file(self, source: str, target: str) -> None:
        """Copy one file, unless the total would exceed the limits."""
        size = os.stat(source).st_size
        if self.files >= _MOST_FILES or self.bytes + size > _MOST_BYTES:
            self.cut += 1
            return
        shutil.copy2(source, target)
        self.files, self.bytes = self.files + 1, self.bytes + size

    def left_out(self, root: Path, folder: str, names: list[str]) -> set[str]:
        """Return the names in a folder below `root` to leave out: keys, git's settings, links out of it."""
        keys = {name for name in names if _is_key(name)}
        hooks = {"hooks", "config"} & set(names) if "HEAD" in names else set()
        outside = {name for name in names if _leads_out(Path(folder, name), root)} - keys
        self.left |= keys
        self.left |= {"git's configuration and hooks"} if hooks else set()
        self.left |= {"links and mounts that lead out of it"} if outside else set()
        return keys | hooks | outside


def copy_without_keys(source: Path, target: Path) -> Copy:
    """Copy a folder or a file, up to a limit.

    Leaves out everything that gives access beyond it: keys, links out of it, and git's configuration and
    hooks. Raises OSError if it cannot be read at all.
    """
    done = Copy()
    if not source.is_dir():
        done.file(str(source), str(target))
        return done
    ignore = functools.partial(done.left_out, source)
    shutil.copytree(source, target, symlinks=True, ignore=ignore, copy_function=done.file)
    return done


def _leads_out(path: Path, root: Path) -> bool:
    """Return True if a path does not belong to the folder: links out of it, mounts, devices, unreadable."""
    if path.is_symlink():
        return os.path.isabs(os.readlink(path)) or not path.resolve().is_relative_to(root.resolve())
    if path.is_dir():
        return path.stat().st_dev != root.stat().st_dev or not os.access(path, os.R_OK | os.X_OK)
    # a file named .git points to a repository in another place
    return path.name == ".git" or not path.is_file() or not os.access(path, os.R_OK)


def _is_key(name: str) -> bool:
    return name not in _NO_KEYS and any(fnmatch.fnmatch(name, pattern) for pattern in _KEYS)
