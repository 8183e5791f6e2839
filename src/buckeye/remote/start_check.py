"""Check that a run can start on another machine, before the machine is ordered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
from packaging.utils import canonicalize_name, parse_wheel_filename

from buckeye.base.distribution import requirements
from buckeye.base.process import run_program
from buckeye.config.inference import InferenceConfig
from buckeye.errors import UsageError
from buckeye.inference.vllm.interpreter import GPU_REQUIREMENTS
from buckeye.launch.preflight.check import Check, failed, skipped
from buckeye.mcp.tasks.trust import TRUSTED_VARIABLE, trusted_digests
from buckeye.remote.base import RemoteRequest
from buckeye.remote.bootstrap import EXTRAS, TOOLS
from buckeye.remote.clean_start import StartInputs
from buckeye.remote.environments import NeededEnvironment
from buckeye.remote.manifest import Manifest
from buckeye.remote.project import Project
from buckeye.remote.software import pinned_requirements
from buckeye.workers.installed.install_source import parse_source
from buckeye.workers.installed.record import ENVIRONMENTS_VARIABLE, environments_home
from buckeye.workers.installed.venv import find_needed_python, find_uv

_START_SECONDS = 600.0
_RESOLVE_SECONDS = 300.0
_COPIED_BYTES = 2**20
_PLATFORM = ("--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_28")
_UNSOLVED = "No solution found"
_NOT_SEARCHED = ("network was disabled", "no usable wheels", "no wheels with a matching", "is disabled")
_KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "TMPDIR", "USER", "LOGNAME", "SHELL", "TERM")
_NETWORK = (
    *("HF_ENDPOINT", "HF_HUB_OFFLINE", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    *("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
)
_PACKAGES, _START = "packages", "start"
_HOST_CHECKS = ("tasks of", "servers of the tasks")

Tell = Callable[[str], None]


def check_start(project: Project, request: RemoteRequest, *, is_rental: bool, tell: Tell) -> None:
    """Raise UsageError with all reasons if the run cannot start on the requested machine.

    The check loads the run with only the files and keys that are sent. For a rented machine, it also checks
    that all packages exist for its platform. `tell` gets a line for each point that cannot be checked on this
    machine.
    """
    tell("Checking that the run can start on the remote machine ...")
    if broken := obstacles(project, request, is_rental=is_rental, tell=tell):
        nothing = "Nothing was ordered" if is_rental else "Nothing was started"
        raise UsageError(
            "\n".join([*broken, f"{nothing}: the run would fail on the machine"]), code="BK-REMOTE-PROOF"
        )


def obstacles(
    project: Project, request: RemoteRequest, *, is_rental: bool, tell: Tell, text: str | None = None
) -> list[str]:
    """Return all reasons why the run cannot start on the requested machine.

    `tell` gets a line for each point that cannot be checked on this machine. `text` is the content of a
    configuration file that is not written yet.
    """
    start = start_checks(project, request, is_rental=is_rental, text=text)
    checks = [*start, *(package_checks(project) if is_rental else ())]
    failures = [check for check in checks if check.state == "failed"]
    # a host of the user may have variables, keys and files that this machine lacks
    doubtful = [check for check in failures if not is_rental and check.name.startswith(_HOST_CHECKS)]
    for check in checks:
        if check.state == "skipped":
            tell(f"not checked: {check.line}")
        elif check.state == "warning" or check in doubtful:
            tell(f"warning: {check.line}")
    return list(dict.fromkeys(check.line for check in failures if check not in doubtful))


def start_checks(
    project: Project, request: RemoteRequest, *, is_rental: bool, text: str | None = None
) -> list[Check]:
    """Run `clean_start` in a folder that has only the files that are sent, and return its results."""
    with TemporaryDirectory(prefix="buckeye-proof-") as name:
        folder, wheels, home = (Path(name, part) for part in ("project", "wheels", "home"))
        for made in (folder, wheels, home):
            made.mkdir()
        copy_project(project.manifest, folder)
        if text is not None:
            file = folder / project.arguments[1]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        packed = [env for env in project.environments if env.in_buckeye_venv and env.wheel is not None]
        for environment in packed:
            zipfile.ZipFile(BytesIO(environment.wheel or b"")).extractall(wheels)
        own = [parse_wheel_filename(environment.what)[0] for environment in packed]
        start = StartInputs(
            arguments=list(project.arguments),
            requirements=[*_requirements(project), *own],
            gpus=request.gpus.count if request.gpus is not None else None,
            rented=is_rental,
            wheels=str(wheels),
            only_here=_local_folders(project.root),
        )
        return _started(start, folder, _environment(project, home))


def _local_folders(root: Path) -> list[str]:
    """Return folders that exist only on this machine."""
    found = [root, Path.home(), *([Path(sys.prefix)] if sys.prefix != sys.base_prefix else [])]
    return [str(folder) for folder in found if folder != Path("/")]


def copy_project(manifest: Manifest, folder: Path) -> None:
    """Copy the files that are sent into `folder`. Large files become links."""
    for name, path in manifest.files.items():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if path.stat().st_size > _COPIED_BYTES:
            place.symlink_to(path.resolve())
        else:
            place.write_bytes(path.read_bytes())
    for name, target in manifest.links.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(target)
    for name in manifest.folders:
        (folder / name).mkdir(parents=True, exist_ok=True)


def _environment(project: Project, home: Path) -> dict[str, str]:
    """Return the environment variables of a process that has only the keys that are sent.

    The process uses the model cache and the installed environments of this machine.
    """
    kept = {name: os.environ[name] for name in (*_KEPT_VARIABLES, *_NETWORK) if name in os.environ}
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return {
        **kept,
        "HOME": str(home),
        "BUCKEYE_HOME": str(home),
        "HF_HOME": os.environ.get("HF_HOME") or str(Path(cache, "huggingface")),
        ENVIRONMENTS_VARIABLE: str(environments_home()),
        TRUSTED_VARIABLE: ",".join(sorted(trusted_digests())),
        "PYTHONDONTWRITEBYTECODE": "1",
        **project.secrets,
    }


def _started(start: StartInputs, folder: Path, env: dict[str, str]) -> list[Check]:
    found = folder.with_name("found")
    argv = [sys.executable, "-m", "buckeye.remote.clean_start", str(found)]
    try:
        done = subprocess.run(  # noqa: S603  an argument list, without a shell
            argv,
            input=msgspec.json.encode(start),
            cwd=folder,
            env=env,
            capture_output=True,
            timeout=_START_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [skipped(_START, f"the environments are not loaded after {_START_SECONDS:g} s")]
    lines = found.read_text(encoding="utf-8").splitlines() if found.exists() else []
    own = json.dumps(f"{folder}/")[1:-1]
    checks = [Check(**json.loads(line.replace(own, ""))) for line in lines if line != "null"]
    if lines[-1:] != ["null"]:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        checks.append(failed(_START, f"ended with code {done.returncode}: {''.join(last)}", ""))
    return checks


def package_checks(project: Project) -> Iterator[Check]:
    """Check that all packages exist for the platform of the remote machine, without a download.

    One check covers the packages in Buckeye's venv: those of Buckeye and of the RL environments installed
    there. Each RL environment with a separate venv has a separate check. Only failed and skipped checks are
    yielded.
    """
    uv = find_uv()
    if uv is None:
        yield skipped(_PACKAGES, "cannot check them without uv", "pip install uv")
        return
    with TemporaryDirectory(prefix="buckeye-proof-") as name:
        environments = project.environments
        wheels = [_wheel(Path(name), env) for env in environments if env.in_buckeye_venv]
        needed = _requirements(project)
        yield from _resolved(uv, "of the run", [*needed, *wheels], pinned_requirements(needed), None)
        yield from _vllm(uv, project.config.inference)
        for env in environments:
            if not env.in_buckeye_venv:
                source = parse_source(env.what) if env.wheel is None else None
                line = source.requirement if source is not None else _wheel(Path(name), env)
                lock = (env.lock or b"").decode(errors="replace").splitlines()
                index = source.index if source is not None else None
                yield from _resolved(uv, f"of {env.what}", [line], lock, index)


def _vllm(uv: str, inference: InferenceConfig | None) -> Iterator[Check]:
    """Check that the vLLM that the remote machine installs exists for its platform.

    With `backend = "vllm"`, missing packages are a failure. Otherwise they are a warning, because the
    built-in engine replaces vLLM.
    """
    if inference is None or inference.backend == "torch":
        return
    for check in _resolved(uv, "of vLLM", GPU_REQUIREMENTS, (), None):
        is_needed = inference.backend == "vllm" or check.state != "failed"
        yield check if is_needed else replace(check, state="warning")


def _requirements(project: Project) -> list[str]:
    return sorted({*requirements({*EXTRAS, *project.extras}), *TOOLS})


def _wheel(folder: Path, env: NeededEnvironment) -> str:
    """Return the requirement of an environment. If it has a wheel, write it into `folder`."""
    if env.wheel is None:
        return env.what
    file = folder / env.what
    file.write_bytes(env.wheel)
    return f"{canonicalize_name(parse_wheel_filename(env.what)[0])} @ {file.as_uri()}"


def _resolved(
    uv: str, what: str, lines: Sequence[str], bounds: Iterable[str], index: str | None
) -> Iterator[Check]:
    """Yield a failed or skipped check if uv finds no versions that satisfy all requirements.

    Try the versions of this machine first, then any versions. The remote machine does the same.
    """
    bounds = list(bounds)
    for tried in (bounds, []) if bounds else ([],):
        try:
            code, output = _compile(uv, lines, tried, index)
        except (OSError, subprocess.TimeoutExpired) as error:
            yield skipped(_PACKAGES, f"{what}: uv: {error}")
            return
        if code == 0:
            return
    last = " ".join(line.strip() for line in output.splitlines() if line.strip())[:1000]
    is_certain = _UNSOLVED in output and not any(words in output for words in _NOT_SEARCHED)
    if is_certain and find_needed_python(output) is None:
        yield failed(_PACKAGES, f"{what}: {last}", "")
    else:
        yield skipped(_PACKAGES, f"{what}: {last}")


def _compile(uv: str, lines: Sequence[str], bounds: Sequence[str], index: str | None) -> tuple[int, str]:
    """Let uv find package versions for the remote machine. Return its exit code and error output."""
    with TemporaryDirectory(prefix="buckeye-proof-") as folder:
        wanted, limits = Path(folder, "wanted.in"), Path(folder, "bounds.txt")
        wanted.write_text("\n".join(lines) + "\n", encoding="utf-8")
        limits.write_text("\n".join(bounds) + "\n", encoding="utf-8")
        where = ["--index", index] if index is not None else []
        words = ["--quiet", "--no-header", *_PLATFORM, "--only-binary", ":all:", *where]
        argv = [uv, "pip", "compile", *words, "--constraint", str(limits), str(wanted)]
        done = run_program(argv, seconds=_RESOLVE_SECONDS)
    return done.returncode, done.stderr
