"""Which walls this machine lets us put around an environment, and the command line that puts them up."""

from __future__ import annotations

import functools
import json
import os
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

_SCRIPT = Path(__file__).with_name("confine.py")
_PROBE_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Walls:
    """What is possible here. Without namespaces an environment has a process group, and its folder."""

    namespaces: bool
    user: bool
    """Namespaces need a user namespace, because we are not root."""
    overlay: bool
    reason: str
    """Why there are no namespaces, in the kernel's words; empty if there are."""

    def describe(self) -> str:
        """For people."""
        if not self.namespaces:
            return f"process groups only, no namespaces ({self.reason})"
        copied = "" if self.overlay else ", root file systems copied (no overlayfs)"
        return f"own processes and mounts{copied}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Root:
    """A root file system for a session."""

    path: Path
    layers: tuple[Path, Path, Path] | None
    """lower, upper, work; None if `path` is a private copy."""
    uid: int | None
    gid: int | None
    cwd: str


@functools.cache
def walls() -> Walls:
    """Try what this machine allows, once."""
    if sys.platform != "linux":
        return Walls(namespaces=False, user=False, overlay=False, reason="not Linux")
    reason = ""
    for user in (False, True) if os.geteuid() == 0 else (True,):
        reason = _probe(user=user, root=None)
        if not reason:
            return Walls(namespaces=True, user=user, overlay=_overlay_works(user), reason="")
    return Walls(namespaces=False, user=False, overlay=False, reason=reason)


def confined(
    argv: Sequence[str], *, limits: Limits, walls: Walls, cwd: Path | None = None, root: Root | None = None
) -> tuple[str, ...]:
    """The command line that runs `argv` behind `walls`: with its own root, or in `cwd`."""
    return confined_by(confinement(limits=limits, walls=walls, cwd=cwd, root=root), argv)


def confinement(
    *, limits: Limits, walls: Walls, cwd: Path | None = None, root: Root | None = None
) -> dict[str, Any]:
    """What confine.py is to do, without the command."""
    return {
        "namespaces": walls.namespaces,
        "user": walls.user,
        "network": limits.network,
        "root": None if root is None else str(root.path),
        "layers": None if root is None or root.layers is None else [str(path) for path in root.layers],
        "uid": None if root is None else root.uid,
        "gid": None if root is None else root.gid,
        "cwd": root.cwd if root is not None else str(cwd),
        "memory": limits.memory,
        "processes": limits.processes,
        "disk": limits.disk,
        "hidden": [str(path) for path in (*key_files(), made_keys()) if os.path.exists(path)],
        "writable": limits.writable,
    }


def confined_by(confine: Mapping[str, Any], argv: Sequence[str]) -> tuple[str, ...]:
    """The command line that has confine.py do this, and then run `argv`."""
    spec = {"argv": list(argv), **confine}
    return (sys.executable, "-I", "-S", str(_SCRIPT), json.dumps(spec))


def confined_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment to start that command line with, so that the command gets `variables`."""
    return {"BUCKEYE_CONFINED_ENV": json.dumps(dict(variables))}


@functools.cache
def keeps_all_else() -> str:
    """What stands in the way of `Limits.writable` on this machine; "" if it works."""
    seen = walls()
    limits = Limits(writable=(tempfile.gettempdir(),))
    return _probe(user=seen.user, root=None, limits=limits) if seen.namespaces else seen.describe()


def _probe(*, user: bool, root: Root | None, limits: Limits | None = None) -> str:
    """Run nothing behind the walls; returns what stood in the way."""
    tried = Walls(namespaces=True, user=user, overlay=False, reason="")
    argv = confined(["/bin/true"], limits=limits or Limits(), walls=tried, cwd=Path("/"), root=root)
    try:
        ran = run_program(argv, seconds=_PROBE_SECONDS, env={})
    except subprocess.TimeoutExpired:
        return f"no answer within {_PROBE_SECONDS:g} s"
    said = ran.stderr.strip().splitlines()
    return "" if ran.returncode == 0 else (said[-1] if said else f"exit code {ran.returncode}")


def _overlay_works(user: bool) -> bool:
    with tempfile.TemporaryDirectory(prefix="buckeye-overlay-") as folder:
        lower, upper, work, merged = (Path(folder, name) for name in ("lower", "upper", "work", "merged"))
        for path in (lower, upper, work, merged):
            path.mkdir()
        # an empty root: to fail at the command, and not at the mount, is what is hoped for
        root = Root(path=merged, layers=(lower, upper, work), uid=None, gid=None, cwd="/")
        return "cannot be run" in _probe(user=user, root=root)
