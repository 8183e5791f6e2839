"""Run images without a Docker daemon: download and unpack an image, and use its files as `/` of a session.

With namespaces, a session has its own processes and mounts, and a writable layer over the image's files. All
sessions share these files. Without namespaces (for example in a container on a rented machine), isolation is
weak: a session has its own user and its own copy of the files. A session never runs as root.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from buckeye.base.threads import finish_in_thread
from buckeye.mcp.fork_server.program import Program
from buckeye.mcp.images.store import Image, fetch_image
from buckeye.mcp.sandbox.confine_command import RootFilesystem, build_confine_spec, sandbox_support
from buckeye.mcp.sandbox.runtime import LaunchSpec, PrepareError, RuntimeUnavailableError, SandboxLimits

_FIRST_USER = 231_072
"""First user and group id for sessions. Linux distributions do not assign ids in this range."""
_BLOCKS, _BLOCK_SIZE = 60, 1_000
_KILL_SECONDS = 10.0
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class ChrootRuntime:
    """Runtime that unpacks images under `folder` and runs them with chroot."""

    name, environment_flag = "chroot", ""

    def __init__(self, limits: SandboxLimits, folder: Path) -> None:
        """Raise RuntimeUnavailableError if this user can neither create namespaces nor call chroot."""
        self._support = sandbox_support()
        if not self._support.namespaces and os.geteuid() != 0:
            raise RuntimeUnavailableError(f"chroot requires root or user namespaces: {self._support.reason}")
        if not limits.network and not self._support.namespaces:
            raise RuntimeUnavailableError(
                f"chroot cannot disable the network: {self._support.reason}", hint="remove `--no-network`"
            )
        self.description = self._support.describe()
        self._limits, self._folder = limits, folder
        self._owner = _FIRST_USER if os.geteuid() == 0 else None
        self._images: dict[str, Image] = {}
        self._users_lock, self._users = _claim_users()

    async def prepare(self, image: str) -> None:
        """Download and unpack an image once. Later calls with the same name use this version."""
        if image not in self._images:
            self._images[image] = await asyncio.to_thread(fetch_image, image, self._folder, owner=self._owner)

    async def launch(self, image: str, session_folder: Path, variables: Mapping[str, str]) -> LaunchSpec:
        """Return the launch of the image's command. `variables` override the variables of the image."""
        unpacked = self._images[image]
        if not unpacked.argv:
            raise PrepareError(
                f"image {image} has no command", hint="add an ENTRYPOINT or a CMD to its Dockerfile"
            )
        is_shared = self._owner is None or self._support.overlay
        user = self._owner if is_shared else next(self._users)
        create_root = _create_layers if self._support.overlay else _copy_tree
        layers = await finish_in_thread(create_root, unpacked.root, session_folder, user)
        on_exit = None if user is None or self._support.namespaces else lambda: kill_user(user)
        env = {"PATH": _PATH, "HOME": "/tmp", "LANG": "C.UTF-8", **unpacked.variables, **variables}  # noqa: S108  a path inside the session
        root = RootFilesystem(path=session_folder / "root", layers=layers, user=user, cwd=unpacked.cwd)
        confine = build_confine_spec(limits=self._limits, sandbox_support=self._support, root=root)
        program = Program(argv=unpacked.argv, env=env, cwd=session_folder, confine=confine)
        return LaunchSpec(program=program, on_exit=on_exit)


def _claim_users() -> tuple[socket.socket, Iterator[int]]:
    """Claim a block of user ids for sessions. Return a lock, and an endless iterator over the ids.

    While the lock (a socket) is open, no other gateway on this machine can claim the block. Gateways must not
    share ids, because the end of a session kills all processes of its user. Raises RuntimeUnavailableError if
    no block is free.
    """
    for number in range(_BLOCKS):
        lock = socket.socket(socket.AF_UNIX)
        try:
            # the kernel removes an abstract name when this process ends
            lock.bind(f"\0buckeye-users-{number}")
        except OSError:
            lock.close()
            continue
        first = _FIRST_USER + 1 + number * _BLOCK_SIZE
        return lock, itertools.cycle(range(first, first + _BLOCK_SIZE))
    raise RuntimeUnavailableError(
        f"chroot: {_BLOCKS} gateways already run on this machine, which is the maximum",
        hint="stop one of them",
    )


def _create_layers(tree: Path, session_folder: Path, user: int | None) -> tuple[Path, Path, Path]:
    """Create the folders of a writable overlay layer over the tree. The session's user owns the layer."""
    root, upper, work = (session_folder / name for name in ("root", "upper", "work"))
    for path in (root, upper, work):
        path.mkdir()
    upper.chmod(0o755)  # this folder becomes the session's `/`
    _make_system_folders(upper)
    if user is not None:
        os.chown(upper, user, user)
    return tree, upper, work


def _copy_tree(tree: Path, session_folder: Path, user: int | None) -> None:
    """Copy the tree to the session's folder. The session's user owns the copy."""
    target = session_folder / "root"
    shutil.copytree(tree, target, symlinks=True)
    _make_system_folders(target)
    if user is not None:
        for parent, folders, files in os.walk(target):
            for name in (".", *folders, *files):
                os.chown(os.path.join(parent, name), user, user, follow_symlinks=False)


def _make_system_folders(root: Path) -> None:
    """Create real folders for mounts. A link in the image could redirect a mount to a folder outside."""
    for name, mode in (("proc", 0o755), ("dev", 0o755), ("tmp", 0o1777)):
        path = root / name
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
            path.mkdir()
        path.chmod(mode)


async def kill_user(user: int) -> None:
    """Kill all processes of a session's user, including processes outside the session's process group."""
    set_user = f"os.setgroups([]); os.setresgid({user}, {user}, {user}); os.setresuid({user}, {user}, {user})"
    code = f"import os; {set_user}; os.kill(-1, {int(signal.SIGKILL)})"
    argv = (sys.executable, "-I", "-S", "-c", code)
    process = await asyncio.create_subprocess_exec(*argv, stderr=asyncio.subprocess.DEVNULL)
    async with asyncio.timeout(_KILL_SECONDS):
        await process.wait()
