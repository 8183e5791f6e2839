"""Find folders and files in a command line, and copy them, so that tools can be tried on the copies."""

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
_OPTIONS_WITH_VALUE = {
    "-m", "-W", "-X", "-p", "-r", "--directory", "--project", "--from", "--with", "--with-editable",
    "--with-requirements", "--python", "--package", "--index", "--index-url", "--extra-index-url",
    "--require", "--import", "--loader", "--env-file", "--default-index", "--find-links",
}  # fmt: skip
_PREFIX = re.compile(r"(--?[\w-]+=|\w+=)?(sqlite:///|file://)?")
_MOUNT = re.compile(r"(?:type=bind,)?(?:src=|source=)?(?P<path>[^:,]+)(?P<rest>[:,].+)")
_KEY_FILES = [
    ".env",
    ".env.*",
    ".netrc",
    "_netrc",
    ".npmrc",
    ".pypirc",
    ".git-credentials",
    ".pgpass",
    ".ssh",
]
_KEY_FILES += [
    ".aws",
    ".gnupg",
    ".kube",
    ".docker",
    "id_rsa",
    "id_ed25519",
    "*.pem",
    "*.p12",
    "*.pfx",
    "*.key",
]
_EXAMPLE_FILES = (".env.example", ".env.sample", ".env.template")
_MAX_BYTES, _MAX_FILES = 200_000_000, 20_000


def program_index(argv: Sequence[str]) -> int:
    """Return the index of the program in a command line.

    The program is the module, package or script that `python`, `npx`, `uv run` or a similar launcher starts.
    """
    index = 0
    while index < len(argv) - 1:
        arg = argv[index]
        if arg == "-m":
            return index + 1
        if arg in _OPTIONS_WITH_VALUE:
            index += 2
        elif arg.startswith("-") or _is_launcher(arg) or re.match(r"\w+=", arg):
            index += 1
        else:
            break
    return min(index, len(argv) - 1)


def _is_launcher(arg: str) -> bool:
    name = Path(arg).name
    return name in _LAUNCHERS or _PYTHON.fullmatch(name) is not None


def named_paths(argv: Sequence[str]) -> tuple[list[str], dict[str, Path]]:
    """Replace folders and files in the arguments of a command by paths in `{workdir}`.

    Also return the user's paths, by their names in `{workdir}`.
    """
    program, portable_argv, paths = program_index(argv), list(argv), dict[str, Path]()
    is_container = Path(argv[0]).name in ("docker", "podman")
    for index, arg in enumerate(argv):
        if index <= program and not re.match(r"[A-Z_]+=", arg):
            continue
        follows_flag = index > 0 and argv[index - 1].startswith("--")
        parts = _split_path(arg, follows_flag=follows_flag, is_container=is_container)
        if parts is not None:
            before, path, after = parts
            portable_argv[index] = before + _workdir_path(path, paths) + after
    return portable_argv, paths


def _split_path(arg: str, *, follows_flag: bool, is_container: bool) -> tuple[str, Path, str] | None:
    """Split an argument into the text before a path, the path, and the text after it; None without a path.

    The bare name of an existing file is a path only after a flag. Elsewhere, the name is more likely a
    subcommand of the server.
    """
    match = _PREFIX.match(arg)
    before = match[0] if match is not None else ""
    rest, after = arg[len(before) :], ""
    if is_container and (volume := _MOUNT.fullmatch(rest)) is not None:
        before, rest, after = before + rest[: volume.start("path")], volume["path"], volume["rest"]
    path = Path(os.path.expanduser(rest))
    if not rest or rest.startswith("-") or len(rest) > 4096:
        return None
    path = Path(os.path.abspath(path))
    is_absolute = rest.startswith(("/", "~"))
    looks_like_path = follows_flag or "/" in rest or rest in (".", "..") or bool(path.suffix) or bool(before)
    if os.path.exists(path) and not (path.is_dir() or path.is_file()):
        return None  # a device, a pipe, a socket
    is_existing = looks_like_path and os.path.exists(path)
    may_be_created = is_absolute and path.parent != Path("/") and path.parent.is_dir()
    return (before, path, after) if is_existing or may_be_created else None


def _workdir_path(path: Path, paths: dict[str, Path]) -> str:
    """Return the path in `{workdir}` for a copy of `path`.

    Add `path` to `paths`, unless it does not exist, or a folder in `paths` contains it.
    """
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
    """Counts of the copied files and bytes, of files above the limit, and the names that were left out."""

    files: int = 0
    bytes: int = 0
    above_limit: int = 0
    excluded: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        notes = [f"without {name}" for name in sorted(self.excluded)]
        notes += [f"without {counted(self.above_limit, 'file')} above the limit"] if self.above_limit else []
        return "; ".join([f"{counted(self.files, 'file')}, {human_bytes(self.bytes)}", *notes])

    def file(self, source: str, target: str) -> None:
        """Copy one file, unless the total would exceed the limits."""
        size = os.stat(source).st_size
        if self.files >= _MAX_FILES or self.bytes + size > _MAX_BYTES:
            self.above_limit += 1
            return
        shutil.copy2(source, target)
        self.files, self.bytes = self.files + 1, self.bytes + size

    def exclude(self, root: Path, folder: str, names: list[str]) -> set[str]:
        """Return the names in a folder to leave out: keys, git's settings, links that lead out of `root`."""
        keys = {name for name in names if _is_key(name)}
        hooks = {"hooks", "config"} & set(names) if "HEAD" in names else set()
        outside = {name for name in names if _leads_out(Path(folder, name), root)} - keys
        self.excluded |= keys
        self.excluded |= {"git's configuration and hooks"} if hooks else set()
        self.excluded |= {"links and mounts to other folders"} if outside else set()
        return keys | hooks | outside


def copy_without_keys(source: Path, target: Path) -> Copy:
    """Copy a folder or a file, up to a limit.

    Leaves out keys, links that lead out of the folder, and git's configuration and hooks. Raises OSError if
    the source cannot be read.
    """
    copy = Copy()
    if not source.is_dir():
        copy.file(str(source), str(target))
        return copy
    ignore = functools.partial(copy.exclude, source)
    shutil.copytree(source, target, symlinks=True, ignore=ignore, copy_function=copy.file)
    return copy


def _leads_out(path: Path, root: Path) -> bool:
    """Return True if a path leads out of `root`, or is a mount, a device, or unreadable."""
    if path.is_symlink():
        return os.path.isabs(os.readlink(path)) or not path.resolve().is_relative_to(root.resolve())
    if path.is_dir():
        return path.stat().st_dev != root.stat().st_dev or not os.access(path, os.R_OK | os.X_OK)
    # a file named .git points to a repository in another place
    return path.name == ".git" or not path.is_file() or not os.access(path, os.R_OK)


def _is_key(name: str) -> bool:
    return name not in _EXAMPLE_FILES and any(fnmatch.fnmatch(name, pattern) for pattern in _KEY_FILES)
