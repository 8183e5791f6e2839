"""Runtimes that run images with the command-line programs docker, podman and apptainer."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from buckeye.base.process import clean_environment, run_program
from buckeye.errors import UsageError
from buckeye.mcp.fork_server.program import Program
from buckeye.mcp.sandbox.runtime import (
    LaunchSpec,
    PrepareError,
    Runtime,
    RuntimeUnavailableError,
    SandboxLimits,
    cache_folder,
)

_INSPECT_SECONDS = 15.0
_PULL_SECONDS = 1800.0
_REMOVE_SECONDS = 60.0
_LABEL = "buckeye.gateway"


def image_runtime(name: str, limits: SandboxLimits, owner: Path) -> Runtime:
    """Return the runtime `name`, or for `auto` the first runtime below that works.

    `owner` is the gateway's private folder. Raises RuntimeUnavailableError if no runtime works, with the
    reason for each runtime.
    """
    factories: dict[str, Callable[[], Runtime]] = {
        "docker": lambda: ContainerRuntime("docker", limits, owner),
        "podman": lambda: ContainerRuntime("podman", limits, owner),
        "apptainer": lambda: ApptainerRuntime(limits, cache_folder() / "apptainer"),
        "chroot": lambda: _chroot_runtime(limits),
    }
    if name != "auto":
        return factories[name]()
    reasons = []
    for create in factories.values():
        try:
            return create()
        except RuntimeUnavailableError as error:
            reasons.append(error.message)
    raise RuntimeUnavailableError(
        "no image runtime works on this machine:\n  " + "\n  ".join(reasons),
        hint="fix one of them, or run a program without an image: `--command` or `--dir`",
    )


class ContainerRuntime:
    """Runtime that runs one container of docker or podman per session, and removes it afterwards."""

    environment_flag = ""

    def __init__(self, name: str, limits: SandboxLimits, owner: Path) -> None:
        """Raise RuntimeUnavailableError if the program does not work. `owner` is the gateway's folder."""
        self.name, self._limits, self._owner = name, limits, owner
        self._program = find_program(name)
        self.description = "a container for each session"

    async def prepare(self, image: str) -> None:
        """Pull the image unless it exists locally. Raises PrepareError."""
        _check_name(image)
        local = await _run([self._program, "image", "inspect", image], _INSPECT_SECONDS)
        if local.returncode != 0:
            await _pull([self._program, "pull", "--quiet", image], image)

    async def launch(self, image: str, session_folder: Path, variables: Mapping[str, str]) -> LaunchSpec:
        """Return a `docker run` command. Its environment has the values of variables, and argv the names."""
        cid = session_folder / "container"
        argv = [self._program, "run", "--rm", "--interactive", f"--cidfile={cid}", "--pull=never", "--init"]
        argv += [f"--label={_LABEL}={self._owner.name}", f"--label={_LABEL}.root={self._root_hash()}"]
        argv += [f"--pids-limit={self._limits.processes}", "--security-opt=no-new-privileges"]
        if self._limits.memory is not None:
            argv.append(f"--memory={self._limits.memory}")
        if self._limits.cpus is not None:
            argv.append(f"--cpus={self._limits.cpus:g}")
        if not self._limits.network:
            argv.append("--network=none")
        for name in variables:
            argv += ["--env", name]
        env = {**self._client_environment(), **variables}
        program = Program(argv=(*argv, image), env=env, cwd=session_folder)
        return LaunchSpec(program=program, on_exit=lambda: self._remove(cid))

    async def remove_leftovers(self, is_alive: Callable[[str], bool]) -> int:
        """Remove the containers of gateways that no longer run, and return the number of containers.

        `is_alive` returns True for the name of a running gateway's folder.
        """
        argv = [self._program, "ps", "--all", f"--filter=label={_LABEL}.root={self._root_hash()}"]
        output = await _run([*argv, f'--format={{{{.ID}}}} {{{{.Label "{_LABEL}"}}}}'], _INSPECT_SECONDS)
        rows = [line.split() for line in output.stdout.splitlines()]
        leaked = [row[0] for row in rows if len(row) == 2 and not is_alive(row[1])]
        if leaked:
            await _run([self._program, "rm", "--force", *leaked], _REMOVE_SECONDS)
        return len(leaked)

    def _client_environment(self) -> dict[str, str]:
        configured = {
            name: value
            for name, value in os.environ.items()
            if name.startswith(("DOCKER_", "CONTAINER_", "XDG_")) and "PASSWORD" not in name
        }
        return clean_environment(configured)

    def _root_hash(self) -> str:
        return hashlib.sha256(str(self._owner.parent).encode()).hexdigest()[:16]

    async def _remove(self, cid: Path) -> None:
        # --rm does not remove the container if the client was killed before the container ended
        with contextlib.suppress(FileNotFoundError):
            await _run([self._program, "rm", "--force", cid.read_text().strip()], _REMOVE_SECONDS)


class ApptainerRuntime:
    """Runtime that pulls an image into one file, and runs one apptainer process per session."""

    name, environment_flag = "apptainer", ""

    def __init__(self, limits: SandboxLimits, cache: Path) -> None:
        """Raise RuntimeUnavailableError if apptainer does not work."""
        self._limits, self._cache = limits, cache
        self._program = find_program(self.name)
        self.description = "a contained process for each session"

    async def prepare(self, image: str) -> None:
        """Pull the image into a file of the cache, once. Raises PrepareError."""
        _check_name(image)
        file = self._file(image)
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            part = file.with_name(f".{file.name}.tmp-{os.getpid()}")
            await _pull([self._program, "pull", "--force", str(part), f"docker://{image}"], image)
            part.replace(file)

    async def launch(self, image: str, session_folder: Path, variables: Mapping[str, str]) -> LaunchSpec:
        """Return an `apptainer run` command without access to files of this machine. It may use the network.

        Files that the environment writes are temporary.
        """
        argv = [self._program, "run", "--containall", "--cleanenv", "--writable-tmpfs"]
        argv += ["--no-privs", "--no-home"]
        if self._limits.memory is not None:
            argv += ["--memory", str(self._limits.memory)]
        if self._limits.cpus is not None:
            argv += ["--cpus", f"{self._limits.cpus:g}"]
        if not self._limits.network:
            argv += ["--net", "--network", "none"]
        prefixed = {f"APPTAINERENV_{name}": value for name, value in variables.items()}
        file, env = str(self._file(image)), clean_environment(prefixed)
        return LaunchSpec(program=Program(argv=(*argv, file), env=env, cwd=session_folder))

    def _file(self, image: str) -> Path:
        return self._cache / f"{hashlib.sha256(image.encode()).hexdigest()[:32]}.sif"


def find_program(name: str) -> str:
    """Return the path of the program `name`. Raises RuntimeUnavailableError if `name version` fails."""
    path = shutil.which(name)
    if path is None:
        hint = f"install {name}, or choose another program"
        raise RuntimeUnavailableError(f"{name} not found in PATH", code="BK-PACKAGE-MISSING", hint=hint)
    try:
        result = run_program([path, "version"], seconds=_INSPECT_SECONDS)
    except (subprocess.TimeoutExpired, OSError) as error:
        raise RuntimeUnavailableError(f"`{name} version` failed: {error}") from None
    if result.returncode != 0:
        reason = (result.stderr.strip() or result.stdout.strip() or "no output").splitlines()[-1]
        raise RuntimeUnavailableError(f"`{name} version` failed: {reason}")
    return path


def _check_name(image: str) -> None:
    if not image or image.startswith("-"):
        raise UsageError(f"invalid image name {image!r}", code="BK-IMAGE", hint="write NAME:TAG")


async def _pull(argv: Sequence[str], image: str) -> None:
    result = await _run(argv, _PULL_SECONDS)
    if result.returncode != 0:
        lines = (result.stderr.strip() or result.stdout.strip()).splitlines()[-3:]
        raise PrepareError(f"cannot pull image {image}: {' '.join(lines)}")


async def _run(argv: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    try:
        return await asyncio.to_thread(run_program, argv, seconds=seconds)
    except subprocess.TimeoutExpired:
        raise PrepareError(f"`{Path(argv[0]).name} {argv[1]}` timed out after {seconds:g} s") from None


def _chroot_runtime(limits: SandboxLimits) -> Runtime:
    from buckeye.mcp.sandbox.chroot_runtime import ChrootRuntime  # slow, because it imports an HTTP client

    return ChrootRuntime(limits, cache_folder() / "images")
