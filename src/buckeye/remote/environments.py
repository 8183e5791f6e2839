"""Find the environments that another machine must install for a run.

An environment that is installed on this machine is sent as a wheel, so that the other machine runs the same
code. The other machine installs it into a separate virtual environment, with the package versions of this
machine. If Buckeye imports the environment into its own process, the other machine installs it next to
Buckeye. An environment that is not installed on this machine is installed from the hub.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import sys
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from subprocess import TimeoutExpired
from tempfile import TemporaryDirectory
from urllib.parse import unquote, urlsplit

from packaging.utils import canonicalize_name

import buckeye
from buckeye.base.process import run_program
from buckeye.config.environments import EnvConfig
from buckeye.dataset.requirements import is_dataset_environment
from buckeye.envs.registry import AGENT, ENTRY_POINT_GROUP, LIBRARIES, EnvironmentId, find_bundled_project
from buckeye.errors import RemoteError, UsageError
from buckeye.mcp.environment import is_mcp
from buckeye.workers.installed import find_installed
from buckeye.workers.installed.venv import Installer, find_uv

_BUILD_SECONDS = 600.0
_NOT_PACKED = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json")
_WHEEL = "WHEEL"
_PURE = "Root-Is-Purelib: true"
_TIME = (2020, 1, 1, 0, 0, 0)  # equal files must give an equal wheel, so all files get this time


@dataclass(frozen=True, kw_only=True, slots=True)
class NeededEnvironment:
    """An environment that the other machine must install.

    `what` is an id for `buckeye env install`, or the file name of the `wheel`. `lock` has the versions of its
    dependencies on this machine. With `in_buckeye_venv`, Buckeye imports the environment into its own
    process, and `what` is an argument of `pip install`.
    """

    what: str
    wheel: bytes | None = None
    lock: bytes | None = None
    in_buckeye_venv: bool = False


def needed_environments(envs: Iterable[EnvConfig]) -> tuple[NeededEnvironment, ...]:
    """Return the environments among `envs` that the other machine must install.

    An environment in a file or folder of the project needs no installation, because the project is sent. An
    environment with a configured interpreter needs none, either.

    Raises UsageError for an environment that the other machine could not find, and RemoteError if its wheel
    cannot be built.
    """
    found: dict[str, NeededEnvironment] = {}
    for env in envs:
        is_own = env.id == AGENT or is_mcp(env.id) or is_dataset_environment(env.id)
        if is_own or env.python is not None:
            continue
        needed = _needed(env.id)
        if needed is not None:
            found[needed.what] = needed
    return tuple(found.values())


def _needed(env_id: str) -> NeededEnvironment | None:
    library = env_id.partition("/")[0]
    installed = find_installed(library if library in LIBRARIES else env_id)
    announced = _announced(env_id)
    if installed is not None and announced is None:
        lock = installed.lock.read_bytes() if installed.lock.is_file() else None
        distribution = Installer(installed.venv, None).distribution(installed.name)
        name, packed = build_wheel(distribution) or (f"{installed.id}@{installed.version}", None)
        return NeededEnvironment(what=name, wheel=packed, lock=lock)
    if Path(env_id).exists():
        return None
    beside = announced or _importable(env_id)
    if beside is not None:
        name, packed = build_wheel(beside) or (f"{beside.name}=={beside.version}", None)
        return NeededEnvironment(what=name, wheel=packed, in_buckeye_venv=True)
    bundle = find_bundled_project(env_id)
    if bundle is not None and bundle.is_relative_to(Path(buckeye.__file__).parent):
        return None  # it is part of Buckeye
    if library in LIBRARIES:
        return NeededEnvironment(what=library)
    if EnvironmentId.parse(env_id).owner is not None:
        return NeededEnvironment(what=env_id)
    raise UsageError(
        f"{env_id} is not installed on this machine, so the remote machine cannot install it",
        code="BK-ENV-UNKNOWN",
        hint=f"install it on this machine: buckeye env install {env_id}",
    )


def _announced(env_id: str) -> metadata.Distribution | None:
    """Return the distribution in this interpreter that registers the environment as an entry point."""
    name = env_id.partition("@")[0].rpartition("/")[2]
    for entry in metadata.entry_points(group=ENTRY_POINT_GROUP):
        if canonicalize_name(entry.name) == canonicalize_name(name):
            return entry.dist
    return None


def _importable(env_id: str) -> metadata.Distribution | None:
    """Return the distribution in this interpreter with the name of the environment, if it can be imported."""
    wanted = EnvironmentId.parse(env_id)
    try:
        return metadata.distribution(wanted.name) if find_spec(wanted.module) is not None else None
    except metadata.PackageNotFoundError:
        return None


def build_wheel(distribution: metadata.Distribution) -> tuple[str, bytes] | None:
    """Return the file name and content of a wheel with the code of an installed distribution.

    Returns None for a distribution with compiled code. For an editable installation, build the wheel from its
    project; raises RemoteError if the build fails.
    """
    folder = _editable(distribution)
    if folder is not None:
        return _built(folder)
    if _PURE not in (distribution.read_text(_WHEEL) or ""):
        return None
    name = f"{distribution.name.replace('-', '_')}-{distribution.version}"
    return f"{name}-py3-none-any.whl", _packed(dict(_files(distribution)))


def _editable(distribution: metadata.Distribution) -> Path | None:
    """Return the project folder of an editable installation, or None for other installations."""
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    if not origin.get("dir_info", {}).get("editable"):
        return None
    return Path(unquote(urlsplit(origin["url"]).path))


def _built(folder: Path) -> tuple[str, bytes]:
    uv = find_uv()
    with TemporaryDirectory(prefix="buckeye-wheel-") as out:
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", out, str(folder)]
        command = [uv, "build", "--quiet", "--wheel", "--out-dir", out, str(folder)] if uv else pip
        try:
            done = run_program(command, seconds=_BUILD_SECONDS)
            said = done.stderr.strip()
        except (OSError, TimeoutExpired) as error:
            said = str(error)
        wheels = sorted(Path(out).glob("*.whl"))
        if not wheels:
            last = "\n".join(f"  | {line}" for line in said.splitlines()[-8:])
            raise RemoteError(f"cannot build a wheel of {folder}:\n{last}", code="BK-ENV-INSTALL")
        return wheels[0].name, wheels[0].read_bytes()


def _files(distribution: metadata.Distribution) -> Iterator[tuple[str, bytes]]:
    """Yield the files of a distribution, except scripts, caches, and records of the installer."""
    for path in distribution.files or ():
        if ".." in path.parts or path.suffix == ".pyc" or path.name in _NOT_PACKED:
            continue
        yield path.as_posix(), Path(str(path.locate())).read_bytes()


def _packed(files: dict[str, bytes]) -> bytes:
    """Return a wheel of these files, with a file RECORD that lists their hashes."""
    info = next(name.partition("/")[0] for name in files if name.endswith(".dist-info/METADATA"))
    record = "".join(f"{name},sha256={_hash(content)},{len(content)}\n" for name, content in files.items())
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in (*files.items(), (f"{info}/RECORD", f"{record}{info}/RECORD,,\n".encode())):
            archive.writestr(zipfile.ZipInfo(name, _TIME), content, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def _hash(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
