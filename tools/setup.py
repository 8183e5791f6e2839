"""Make a virtual environment with Buckeye, its environments and its development tools in it.

Run by `make setup` with any Python >= 3.11; does nothing if nothing has changed since the last time.

Where there is no NVIDIA GPU, the CPU build of torch is asked for by its own version number (`+cpu`), so no
CUDA build (several gigabytes) can be chosen: first from the package index that pip is set up with, then from
PyTorch's own index of CPU builds. Set BUCKEYE_TORCH to a requirement (`torch==2.14.0`) to choose yourself.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PROJECTS = (".[train,dev,docs]", "environments/dakota1890", "environments/text_2048")
SATELLITES = ("packages/adapters", "packages/audit", "packages/machines", "packages/mcp", "packages/ui")
FORMER_NAME = "buckeye"  # of our distribution, until 0.1.0; on PyPI it is somebody else's
INPUTS = (
    "pyproject.toml",
    "hatch_build.py",
    *(f"{satellite}/pyproject.toml" for satellite in SATELLITES),
    "environments/dakota1890/pyproject.toml",
    "environments/text_2048/pyproject.toml",
    "tools/setup.py",
)


def main() -> int:
    """Create or bring up to date the environment named on the command line."""
    target = ROOT / (sys.argv[1] if len(sys.argv) > 1 else ".venv")
    if sys.version_info < (3, 11):  # noqa: UP036  this script is what tells the user
        print("error: Buckeye needs Python 3.11 or newer; set PYTHON, e.g. `make setup PYTHON=python3.12`")
        return 2
    stamp, wanted = target / ".buckeye-setup", fingerprint()
    if stamp.exists() and stamp.read_text() == wanted:
        return 0
    python = target / "bin" / "python"
    if python.exists():  # first, as both names have the same commands
        pip(python, "uninstall", "--yes", FORMER_NAME, quiet=True)
    else:
        print(f"creating {target}", flush=True)
        venv.create(target, with_pip=True)
    if not install_torch(python):
        return 1
    print("installing Buckeye and what it needs", flush=True)
    satellites = [word for project in SATELLITES for word in ("-e", project)]
    editable = [word for project in PROJECTS for word in ("-e", project)]
    # The first brings the satellites as copies, with all that they need; the second makes them editable.
    if not (pip(python, "install", *editable) and pip(python, "install", "--no-deps", *satellites)):
        print("error: the installation failed; the lines above say why")
        return 1
    stamp.write_text(wanted)
    return 0


def fingerprint() -> str:
    """Changes when what would be installed does."""
    parts = [(ROOT / name).read_bytes() for name in INPUTS]
    parts += [os.environ.get("BUCKEYE_TORCH", "").encode(), str(ROOT).encode(), sys.version.encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def install_torch(python: Path) -> bool:
    """Install the build of torch that suits the machine, if there is none yet."""
    there = subprocess.run([python, "-c", "import torch"], capture_output=True, check=False)
    if there.returncode == 0:
        return True
    print("installing torch", flush=True)
    chosen = os.environ.get("BUCKEYE_TORCH")
    if chosen:
        return pip(python, "install", chosen)
    if shutil.which("nvidia-smi") or platform.system() != "Linux":
        return pip(python, "install", f"torch=={TORCH}")
    cpu_build = f"torch=={TORCH}+cpu"
    if pip(python, "install", cpu_build, quiet=True):
        return True
    if pip(python, "install", cpu_build, "--extra-index-url", CPU_INDEX):
        return True
    print(
        f"error: no CPU build of torch {TORCH} could be had; choose one: BUCKEYE_TORCH='torch==X' make setup"
    )
    return False


def pip(python: Path, *words: str, quiet: bool = False) -> bool:
    """Run pip; `quiet` also hides its errors (another attempt follows, or nothing was to be done)."""
    command = [python, "-m", "pip", "--quiet", "--disable-pip-version-check", *words]
    hidden = subprocess.DEVNULL if quiet else None
    return subprocess.run(command, cwd=ROOT, check=False, stderr=hidden).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
