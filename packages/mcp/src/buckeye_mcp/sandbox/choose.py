"""Which runtime serves a session."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from buckeye.errors import UsageError
from buckeye_mcp.sandbox.base import Limits, Runtime, RuntimeUnavailable, cache_folder
from buckeye_mcp.sandbox.command import CommandRuntime, FolderRuntime
from buckeye_mcp.sandbox.containers import ApptainerRuntime, ContainerRuntime

log = logging.getLogger(__name__)

FOR_IMAGES = ("docker", "podman", "apptainer", "chroot")
"""Runtimes of images, the first that works being preferred."""


def image_runtime(name: str, limits: Limits, owner: Path) -> Runtime:
    """The runtime called `name`, or for `auto` the first that works here; `owner` is the gateway's folder.

    Raises RuntimeUnavailable, saying of each what is missing.
    """
    makers: dict[str, Callable[[], Runtime]] = {
        "docker": lambda: ContainerRuntime("docker", limits, owner),
        "podman": lambda: ContainerRuntime("podman", limits, owner),
        "apptainer": lambda: ApptainerRuntime(limits, cache_folder() / "apptainer"),
        "chroot": lambda: _chroot(limits),
    }
    if name != "auto":
        return makers[name]()
    missing = []
    for maker in makers.values():
        try:
            return maker()
        except RuntimeUnavailable as error:
            missing.append(str(error))
    raise RuntimeUnavailable("No runtime for images works on this machine:\n  " + "\n  ".join(missing))


def _chroot(limits: Limits) -> Runtime:
    from buckeye_mcp.sandbox.chroot import ChrootRuntime  # brings an HTTP client along

    return ChrootRuntime(limits, cache_folder() / "images")


class FixedChoice:
    """One command or folder for all sessions; which images they ask for is said in the log, once each."""

    def __init__(self, runtime: CommandRuntime | FolderRuntime, shown: str) -> None:
        self._runtime, self._shown = runtime, shown
        self._told: set[str] = set()

    def __call__(self, image: str) -> Runtime:
        if image and image not in self._told:
            self._told.add(image)
            log.warning("Sessions that ask for the image %s get %s", image, self._shown)
        return self._runtime


class ImageChoice:
    """A container or an unpacked tree of the image that the session asks for."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    def __call__(self, image: str) -> Runtime:
        if not image:
            raise UsageError(
                "This session names no image. Send the header Mcp-Image (in the task's mcp_config), or start "
                "the gateway with --image, --command or --dir."
            )
        return self.runtime


def fixed_choice(command: Sequence[str] | None, folder: Path | None, limits: Limits) -> FixedChoice:
    """For `--command` or `--dir`. Raises UsageError."""
    if folder is not None:
        return FixedChoice(FolderRuntime(folder, limits), f"--dir {folder}")
    return FixedChoice(CommandRuntime(command or (), limits), "--command")
