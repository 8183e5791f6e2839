"""Runtimes for containers, with the command-line programs docker, podman and apptainer."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from buckeye.base.process import clean_environment, run_program
from buckeye.errors import UsageError
from buckeye.mcp.sandbox.runtime import (
    LaunchSpec,
    PrepareError,
    Runtime,
    RuntimeUnavailableError,
    SandboxLimits,
    cache_folder,
)

_ANSWER_SECONDS = 15.0
_PULL_SECONDS = 1800.0
_REMOVE_SECONDS = 60.0
_LABEL = "buckeye.gateway"
_OF_THE_CLIENT = re.compile(
    r"^(PATH|HOME|LD_.*|XDG_.*|DOCKER_.*|BUILDKIT_.*|PODMAN_.*|CONTAINERS?_.*|REGISTRY_AUTH_FILE|"
    r"APPTAINER.*|SINGULARITY.*|GODEBUG|SSL_CERT_.*|(HTTPS?|NO|ALL)_PROXY|TMPDIR)$"
)
"""Variables that the container programs read themselves. A session may not set them by headers."""


class ContainerRuntime:
    """docker or podman: one container per session, removed at its end."""

    only_environment = ""

    def __init__(self, name: str, limits: SandboxLimits, owner: Path) -> None:
        """`owner` is the gateway's own folder. Raises RuntimeUnavailableError if the program does not work."""
        self.name, self._limits, self._owner = name, limits, owner
        self._program = find_program(name)
        self.description = "a container for each session"

    async def prepare(self, image: str) -> None:
        """Pull the image unless it exists locally. Raises PrepareError."""
        _check_name(image)
        here = await _output([self._program, "image", "inspect", image], _ANSWER_SECONDS)
        if here.returncode != 0:
            await _pull([self._program, "pull", "--quiet", image], image)

    async def launch(self, image: str, session_folder: Path, variables: Mapping[str, str]) -> LaunchSpec:
        """Return a `docker run` command. Its argv has only the names of variables, not their values."""
        _check_variables(variables, self.name)
        cid = session_folder / "container"
        argv = [self._program, "run", "--rm", "--interactive", f"--cidfile={cid}", "--pull=never", "--init"]
        argv += [f"--label={_LABEL}={self._owner.name}", f"--label={_LABEL}.root={self._root()}"]
        argv += [f"--pids-limit={self._limits.processes}", "--security-opt=no-new-privileges"]
        if self._limits.memory is not None:
            argv.append(f"--memory={self._limits.memory}")
        if self._limits.cpus is not None:
            argv.append(f"--cpus={self._limits.cpus:g}")
        if not self._limits.network:
            argv.append("--network=none")
        for name in variables:
            argv += ["--env", name]
        return LaunchSpec(
            argv=(*argv, image),
            env={**self._own_environment(), **variables},
            cwd=session_folder,
            on_exit=lambda: self._remove(cid),
        )

    async def remove_leftovers(self, alive: Callable[[str], bool]) -> int:
        """Remove the containers of ended gateways, and return their number."""
        argv = [self._program, "ps", "--all", f"--filter=label={_LABEL}.root={self._root()}"]
        listed = await _output([*argv, f'--format={{{{.ID}}}} {{{{.Label "{_LABEL}"}}}}'], _ANSWER_SECONDS)
        rows = [line.split() for line in listed.stdout.splitlines()]
        gone = [row[0] for row in rows if len(row) == 2 and not alive(row[1])]
        if gone:
            await _output([self._program, "rm", "--force", *gone], _REMOVE_SECONDS)
        return len(gone)

    def _own_environment(self) -> dict[str, str]:
        configured = {
            name: value
            for name, value in os.environ.items()
            if name.startswith(("DOCKER_", "CONTAINER_", "XDG_")) and "PASSWORD" not in name
        }
        return clean_environment(configured)

    def _root(self) -> str:
        return hashlib.sha256(str(self._owner.parent).encode()).hexdigest()[:16]

    async def _remove(self, cid: Path) -> None:
        # --rm has removed the container, unless the client was killed before the container ended
        with contextlib.suppress(FileNotFoundError):
            await _output([self._program, "rm", "--force", cid.read_text().strip()], _REMOVE_SECONDS)


class ApptainerRuntime:
    """apptainer: an image becomes one file, and every session a contained process."""

    name, only_environment = "apptainer", ""

    def __init__(self, limits: SandboxLimits, cache: Path) -> None:
        """Raises RuntimeUnavailableError if the program does not work."""
        self._limits, self._cache = limits, cache
        self._program = find_program(self.name)
        self.description = "a contained process for each session"

    async def prepare(self, image: str) -> None:
        """Pull the image into a file. Raises PrepareError."""
        _check_name(image)
        file = self._file(image)
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            part = file.with_name(f".{file.name}.tmp-{os.getpid()}")
            await _pull([self._program, "pull", "--force", str(part), f"docker://{image}"], image)
            part.replace(file)

    async def launch(self, image: str, session_folder: Path, variables: Mapping[str, str]) -> LaunchSpec:
        """Return an `apptainer run` command, which shares only the network and has temporary files."""
        _check_variables(variables, self.name)
        argv = [self._program, "run", "--containall", "--cleanenv", "--writable-tmpfs"]
        argv += ["--no-privs", "--no-home"]
        if self._limits.memory is not None:
            argv += ["--memory", str(self._limits.memory)]
        if self._limits.cpus is not None:
            argv += ["--cpus", f"{self._limits.cpus:g}"]
        if not self._limits.network:
            argv += ["--net", "--network", "none"]
        given = {f"APPTAINERENV_{name}": value for name, value in variables.items()}
        return LaunchSpec(
            argv=(*argv, str(self._file(image))), env=clean_environment(given), cwd=session_folder
        )

    def _file(self, image: str) -> Path:
        return self._cache / f"{hashlib.sha256(image.encode()).hexdigest()[:32]}.sif"


def find_program(name: str) -> str:
    """Return the path of docker, podman, apptainer or buildah. Raises RuntimeUnavailableError if it fails."""
    found = shutil.which(name)
    if found is None:
        raise RuntimeUnavailableError(f"{name}: not installed (no such program in PATH).")
    try:
        ran = run_program([found, "version"], seconds=_ANSWER_SECONDS)
    except (subprocess.TimeoutExpired, OSError) as error:
        raise RuntimeUnavailableError(f"{name}: installed, and does not answer: {error}") from None
    if ran.returncode != 0:
        said = (ran.stderr.strip() or ran.stdout.strip() or "no reason given").splitlines()[-1]
        raise RuntimeUnavailableError(f"{name}: installed, and does not work: {said}")
    return found


def _check_name(image: str) -> None:
    if not image or image.startswith("-"):
        raise UsageError(f"{image!r} is not the name of an image.")


def _check_variables(variables: Mapping[str, str], runtime: str) -> None:
    for name in variables:
        if _OF_THE_CLIENT.match(name):
            raise UsageError(f"{runtime} reads the variable {name} itself, so a session cannot set it.")


async def _pull(argv: Sequence[str], image: str) -> None:
    ran = await _output(argv, _PULL_SECONDS)
    if ran.returncode != 0:
        said = (ran.stderr.strip() or ran.stdout.strip()).splitlines()[-3:]
        raise PrepareError(f"image {image} cannot be pulled: {' '.join(said)}")


async def _output(argv: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    try:
        return await asyncio.to_thread(run_program, argv, seconds=seconds)
    except subprocess.TimeoutExpired:
        raise PrepareError(f"{Path(argv[0]).name} {argv[1]} gave no answer within {seconds:g} s.") from None


IMAGE_RUNTIMES = ("docker", "podman", "apptainer", "chroot")
"""Runtimes of images, in order of preference."""


def image_runtime(name: str, limits: SandboxLimits, owner: Path) -> Runtime:
    """Return the runtime `name`, or for `auto` the first that works. `owner` is the gateway's folder.

    Raises RuntimeUnavailableError, for `auto` with the reason of each runtime.
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
        except RuntimeUnavailableError as error:
            missing.append(str(error))
    raise RuntimeUnavailableError("No runtime for images works on this machine:\n  " + "\n  ".join(missing))


def _chroot(limits: SandboxLimits) -> Runtime:
    from buckeye.mcp.sandbox.chroot_runtime import ChrootRuntime  # imports an HTTP client

    return ChrootRuntime(limits, cache_folder() / "images")
