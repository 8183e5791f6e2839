"""Create a virtual environment with Buckeye, its environments and its development tools.

`make setup` runs this with any Python >= 3.11. It does nothing if nothing has changed since the last run.

Everything except torch comes from `uv.lock`, installed by uv. If uv is unavailable, pip resolves the
requirements of pyproject.toml instead. Without an NVIDIA GPU, torch is its CPU build, requested by its exact
version (`+cpu`), so that no CUDA build (several gigabytes) can be chosen: first from the package index that
pip is configured with, then from PyTorch's index of CPU builds. Set BUCKEYE_TORCH to a requirement
(`torch==2.14.0`) to choose another.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
ENVIRONMENTS = ("environments/dakota1890", "environments/text_2048")
EXTRAS = ("train", "dev")
UV = "uv>=0.9"
FORMER_NAMES = (
    "buckeye",
    "buckeye-adapters",
    "buckeye-audit",
    "buckeye-machines",
    "buckeye-mcp",
    "buckeye-ui",
)
INPUTS = (
    "pyproject.toml",
    "uv.lock",
    *(f"{environment}/pyproject.toml" for environment in ENVIRONMENTS),
    "tools/setup.py",
)
_CUDA_PACKAGE = re.compile(r"(torch|triton|nvidia-[\w-]+|cuda-[\w-]+)==")


def main() -> int:
    """Create or update the environment named on the command line."""
    target = ROOT / (sys.argv[1] if len(sys.argv) > 1 else ".venv")
    if sys.version_info < (3, 11):  # noqa: UP036  this script reports it to the user
        print("error: Python is older than 3.11\nhint: Set PYTHON: `make setup PYTHON=python3.12`")
        return 2
    with locked(target):
        stamp, digest = target / ".buckeye-setup", fingerprint()
        if stamp.exists() and stamp.read_text() == digest:
            return 0
        python = make_venv(target)
        if not install_torch(python):
            return 1
        print("installing Buckeye and its dependencies", flush=True)
        if not (install_locked(python) or install_resolved(python)):
            print("error: the installation failed: see the lines above")
            return 1
        stamp.write_text(digest)
        return 0


@contextmanager
def locked(target: Path) -> Iterator[None]:
    """Hold the lock of an environment, so that a second `make setup` waits."""
    folder = ROOT / ".cache"
    folder.mkdir(exist_ok=True)
    with (folder / f"setup{hashlib.sha256(str(target).encode()).hexdigest()[:8]}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another `make setup` of {target}", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        os.set_inheritable(lock.fileno(), True)  # an installer that outlives this process holds it too
        yield


def make_venv(target: Path) -> Path:
    """Return the Python of the environment, creating it unless it has one with pip.

    An environment from an interrupted setup, or made by uv, gets pip.
    """
    python = target / "bin" / "python"
    if python.exists() and (
        pip(python, "--version", quiet=True) or run(python, "-m", "ensurepip", "--upgrade", quiet=True)
    ):
        pip(python, "uninstall", "--yes", *FORMER_NAMES, quiet=True)  # their commands have the same names
    else:
        print(f"creating {target}", flush=True)
        venv.create(target, with_pip=True, clear=(target / "pyvenv.cfg").exists())
    return python


def fingerprint() -> str:
    """Return a digest of everything that determines the installation."""
    parts = [(ROOT / name).read_bytes() for name in INPUTS]
    parts += [os.environ.get("BUCKEYE_TORCH", "").encode(), str(ROOT).encode(), sys.version.encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def install_torch(python: Path) -> bool:
    """Install the build of torch for this machine, unless one is installed."""
    if run(python, "-c", "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"):
        return True
    print("installing torch", flush=True)
    requirement = os.environ.get("BUCKEYE_TORCH")
    if requirement:
        return pip(python, "install", requirement)
    if shutil.which("nvidia-smi") or platform.system() != "Linux":
        return pip(python, "install", f"torch=={TORCH}")
    cpu_build = f"torch=={TORCH}+cpu"
    if pip(python, "install", cpu_build, quiet=True):
        return True
    if pip(python, "install", cpu_build, "--extra-index-url", CPU_INDEX):
        return True
    print(
        f"error: no CPU build of torch {TORCH} found\nhint: Choose one: BUCKEYE_TORCH='torch==X' make setup"
    )
    return False


def install_locked(python: Path) -> bool:
    """Install the versions in uv.lock except torch, and this project. Return False if uv is unavailable."""
    uv = python.parent / "uv"
    if not (uv.exists() or pip(python, "install", UV, quiet=True)):
        return False
    extras = [arg for extra in EXTRAS for arg in ("--extra", extra)]
    export = [
        uv,
        "export",
        "--quiet",
        "--frozen",
        "--no-emit-project",
        "--no-hashes",
        "--no-annotate",
        *extras,
    ]
    exported = subprocess.run(export, cwd=ROOT, check=False, capture_output=True, text=True)
    if exported.returncode != 0:
        return False
    lines = [line for line in exported.stdout.splitlines() if not _CUDA_PACKAGE.match(line)]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as requirements:
        requirements.write("\n".join(lines))
        requirements.flush()
        install = (uv, "pip", "install", "--quiet", "--python", python, "--no-deps")
        projects = [arg for project in (".", *ENVIRONMENTS) for arg in ("-e", project)]
        return run(*install, "-r", requirements.name) and run(*install, *projects)


def install_resolved(python: Path) -> bool:
    """Install the requirements of pyproject.toml as pip resolves them."""
    print("uv is not available; pip resolves the requirements", flush=True)
    project = f".[{','.join(EXTRAS)}]"
    return pip(python, "install", *(arg for path in (project, *ENVIRONMENTS) for arg in ("-e", path)))


def pip(python: Path, *args: str, quiet: bool = False) -> bool:
    """Run pip; `quiet` hides its output if a failure leads to another attempt."""
    return run(python, "-m", "pip", "--quiet", "--disable-pip-version-check", *args, quiet=quiet)


def run(*argv: str | Path, quiet: bool = False) -> bool:
    """Run a program in the root of the checkout. Return True if it succeeded."""
    output = subprocess.DEVNULL if quiet else None
    result = subprocess.run(argv, cwd=ROOT, check=False, stdout=output, stderr=output, close_fds=False)
    return result.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
