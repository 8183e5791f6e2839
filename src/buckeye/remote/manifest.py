"""List the files of a project to send to another machine, with the SHA-256 of their content."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from buckeye.base.disk import human_bytes
from buckeye.base.storage import sha256_file
from buckeye.errors import UsageError

MOST_FILES = 20_000
MOST_BYTES = 4 * 2**30

_LEFT_OUT = (
    ".git/",
    ".hg/",
    ".svn/",
    ".env",
    ".env.*",
    ".venv/",
    "venv/",
    "node_modules/",
    "__pycache__/",
    ".cache/",
    ".mypy_cache/",
    ".pytest_cache/",
    ".ruff_cache/",
    ".hypothesis/",
    "/outputs/",
    "*.pyc",
    "*.pem",
    "id_rsa",
    "id_ecdsa",
    "id_ed25519",
)
"""Patterns of files that are not sent unless the configuration names them.

They match version control, keys, generated files and runs.
"""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of a project to send. The keys are paths relative to the project, with slashes.

    `files` maps each path to a local file, and `links` maps each path to the target of a symbolic link.
    `folders` are empty folders in required folders. `outside` are links to files outside of the project,
    which are not sent.
    """

    files: dict[str, Path] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)

    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of each file by path, with `x` at the end if the file is executable."""
        return {
            name: sha256_file(path) + ("x" if os.access(path, os.X_OK) else "")
            for name, path in self.files.items()
        }

    @property
    def size(self) -> int:
        """Total bytes of all files."""
        return sum(path.stat().st_size for path in self.files.values())


def project_manifest(
    root: Path, *, needed: Collection[Path] = (), skipped: Collection[Path] = ()
) -> Manifest:
    """Return the files under `root` to send, and all of `needed`.

    The manifest leaves out matches of `.gitignore` files and of the built-in list, and the folders `skipped`.
    Files in `needed` are always sent. Raises UsageError, with the largest folders, if the project is too
    large.
    """
    found = Manifest()
    folders = {path.resolve() for path in skipped}
    for path in _walk(root, [_Rules(root, _LEFT_OUT)], folders):
        _add(found, root, path)
        _refuse_large(found, root)
    for path in needed:
        for one in sorted(path.rglob("*")) if path.is_dir() else [path]:
            _need(found, root, one, path)
    return found


def _need(found: Manifest, root: Path, one: Path, whole: Path) -> None:
    """Add a required file, link or empty folder.

    A link is sent as a link if its target is in `whole`, and as a file otherwise.
    """
    if one.is_symlink() and one.resolve().is_relative_to(whole.resolve()):
        found.links[_name(root, one)] = os.readlink(one)
    elif one.is_file():
        found.files[_name(root, one)] = one
    elif one.is_dir() and not any(one.iterdir()):
        found.folders.append(_name(root, one))


class _Rules:
    """The patterns of one `.gitignore` file, for paths below its folder."""

    def __init__(self, folder: Path, lines: Collection[str]) -> None:
        from pathspec import GitIgnoreSpec

        self._folder, self._spec = folder, GitIgnoreSpec.from_lines(lines)

    def verdict(self, path: Path, *, is_folder: bool) -> bool | None:
        """Return True if a path is left out, False if it is included, and None if no pattern matches."""
        name = path.relative_to(self._folder).as_posix() + ("/" if is_folder else "")
        return self._spec.check_file(name).include


def _walk(folder: Path, rules: list[_Rules], skipped: Collection[Path]) -> Iterator[Path]:
    """Yield files and links in a folder and its subfolders, in a fixed order."""
    own = folder / ".gitignore"
    if own.is_file():
        rules = [*rules, _Rules(folder, own.read_text(encoding="utf-8", errors="replace").splitlines())]
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        path = Path(entry.path)
        is_folder = entry.is_dir(follow_symlinks=False)
        if _left_out(path, rules, is_folder=is_folder) or (is_folder and path.resolve() in skipped):
            continue
        if is_folder:
            yield from _walk(path, rules, skipped)
        elif entry.is_symlink() or entry.is_file():
            yield path


def _left_out(path: Path, rules: list[_Rules], *, is_folder: bool) -> bool:
    verdicts = [rule.verdict(path, is_folder=is_folder) for rule in rules]
    if verdicts[0]:
        return True  # a .gitignore file cannot re-include keys and version control
    return next((verdict for verdict in reversed(verdicts) if verdict is not None), False)


def _add(found: Manifest, root: Path, path: Path) -> None:
    name = _name(root, path)
    if not path.is_symlink():
        found.files[name] = path
    elif path.resolve().is_relative_to(root.resolve()) and not Path(os.readlink(path)).is_absolute():
        found.links[name] = os.readlink(path)
    else:
        found.outside.append(name)


def _name(root: Path, path: Path) -> str:
    return PurePosixPath(path.absolute().relative_to(root.absolute())).as_posix()


def _refuse_large(found: Manifest, root: Path) -> None:
    count = len(found.files)
    if count % 1000 and count <= MOST_FILES:
        return
    size = found.size
    if count <= MOST_FILES and size <= MOST_BYTES:
        return
    folders: dict[str, int] = {}
    for name, path in found.files.items():
        first = name.split("/", 1)[0]
        folders[first] = folders.get(first, 0) + path.stat().st_size
    largest = sorted(folders, key=lambda name: -folders[name])[:3]
    listed = ", ".join(f"{name} ({human_bytes(folders[name])})" for name in largest)
    raise UsageError(
        f"{root} has more than {MOST_FILES} files or {human_bytes(MOST_BYTES)} to send; largest: {listed}",
        code="BK-REMOTE-TRANSFER",
        hint="start from the project's folder, or exclude files in .gitignore",
    )
